"""Fuses elementwise functions, such as GELU, SwiGLU and their gradients, into the kernels that quantize their results.

XLA cannot fuse into a Pallas kernel: it writes the array, and the kernel reads it. After differentiation, forward and backward
are one trace. In this trace, the operand of an FP8 matmul is followed back to the results of other matmuls. The kernel reads
those results instead, and the operand is not written unless another equation needs it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend import core
from jax.typing import DTypeLike

from jgraph.autodiff import replay
from jgraph.autodiff.replay import Atom, Aval, Reader, aval_of
from jgraph.kernels.elementwise import IDENTITY, Computed, Elementwise, Operand, can
from jgraph.kernels.quantize import CALLS, RotatedBack, Want, can_rotate, cast_transpose, choose, has_kernel
from jgraph.kernels.rotary import GRADIENT
from jgraph.scopes import scope
from jgraph.types import Tree

_MAX_TILES = 4  # Maximum number of [M, N] inputs of a kernel, because all input tiles must fit into shared memory.
_FLOATS = (jnp.bfloat16, jnp.float32)
_WRITTEN = ("optimization_barrier", "dot_general")
"""Primitives that write their results to memory, where a kernel can read them."""
_VIEWS = ("reshape", "copy")

_Shape: TypeAlias = tuple[int, ...]
_Result = TypeVar("_Result")


def fused(fn: Callable[..., _Result], implementation: str = "auto") -> Callable[..., _Result]:
    """Fuses elementwise functions into the quantization kernels that read their results. Apply it to differentiated functions.

    Results differ from those of `fn`: the kernels do not round intermediate values to bfloat16. Takes no keyword arguments.
    """

    @wraps(fn)
    def run(*args: Tree) -> _Result:
        # `mosaic` is Pallas (Hopper or Blackwell; jax 0.11 or newer), and `auto` is `mosaic` where device and shape permit it.
        if implementation == "auto" and not has_kernel():
            return fn(*args)
        closed, out = jax.make_jaxpr(fn, return_shape=True)(*args)
        leaves = jax.tree.leaves(args)
        if any(map(_is_inlined, closed.jaxpr.eqns)):
            closed = jax.make_jaxpr(lambda *leaves, whole=closed: _inlined(whole.jaxpr, whole.consts, leaves))(*leaves)
        # Bodies of loops and the recomputation of `jax.checkpoint` are not fused.
        fusions, needed = _fusions(closed.jaxpr, implementation)

        def evaluate(i: int, eqn: core.JaxprEqn, read: Reader[Array]) -> Sequence[Array] | None:
            if i not in needed:
                return None
            if i in fusions:
                return fusions[i].run(read, eqn, implementation)
            return replay.apply(eqn, [read(v) for v in eqn.invars])

        return jax.tree.unflatten(jax.tree.structure(out), replay.interpret(closed.jaxpr, closed.consts, leaves, evaluate))

    return run


def _is_inlined(eqn: core.JaxprEqn) -> bool:
    """True for a `jax.checkpoint` equation that compiles to its body without a barrier."""
    return eqn.primitive.name in replay.CHECKPOINTS and not (eqn.params["differentiated"] and np.any(eqn.params["prevent_cse"]))


def _inlined(jaxpr: core.Jaxpr, consts: Sequence[Array], args: Sequence[Array]) -> list[Array]:
    """Evaluates a jaxpr, and inlines the bodies of its `jax.checkpoint` equations."""

    def evaluate(_: int, eqn: core.JaxprEqn, read: Reader[Array]) -> Sequence[Array]:
        values = [read(v) for v in eqn.invars]
        return _inlined(replay.body(eqn), replay.body_consts(eqn), values) if _is_inlined(eqn) else replay.apply(eqn, values)

    return replay.interpret(jaxpr, consts, args, evaluate)


@dataclass(frozen=True)
class _Fusion:
    """A function that is fused into the following call of `cast_transpose` or `amax`."""

    fn: Elementwise | None  # None for a `RotatedBack`
    # Arguments of the function, which the kernel reads as [M, N], [M, 1] or [1, N]; of a `RotatedBack`, in other shapes.
    inputs: tuple[tuple[Atom, _Shape], ...] = ()
    replaced: tuple[core.Var, ...] = ()  # hold the result of the function, and need not be computed

    def run(self, read: Reader[Array], eqn: core.JaxprEqn, implementation: str) -> list[Array]:
        call = _quantization(eqn)
        assert call is not None, "only quantizations are fused"
        dtype, want, results = call
        scale = read(eqn.invars[1]) if len(eqn.invars) == 2 else jnp.float32(1)
        # A constant is not reshaped to its own shape: the new NumPy array would be another constant of the program.
        inputs = tuple(x if (x := read(v)).shape == shape else x.reshape(shape) for v, shape in self.inputs)
        x = RotatedBack(*inputs) if self.fn is None else Computed(self.fn, inputs)
        with scope("quantize"):
            found = cast_transpose(x, scale, dtype, want=want, implementation=implementation)
        return [getattr(found, name) for name in results]


def _quantization(eqn: core.JaxprEqn) -> tuple[DTypeLike, Want, tuple[str, ...]] | None:
    """Returns the FP8 dtype, the value of `want` and the names of the results of a call of `cast_transpose` or `amax`.

    None for any other equation, for a call with a `Computed` argument, and if the only FP8 result is square.
    """
    want = CALLS.get(eqn.params.get("name", "")) if eqn.primitive.name in replay.JITS else None
    if want is None or not 1 <= len(eqn.invars) <= 2:
        return None
    # Dead code elimination may have removed some results of the call, so results are identified by their shapes.
    avals = [aval_of(v) for v in eqn.outvars]
    shape = aval_of(eqn.invars[0]).shape
    shapes = {"rows": shape, "columns": shape[::-1]}
    names = []
    dtype = jnp.dtype(jnp.float8_e4m3fn)
    for aval in avals:
        if aval.shape == () and aval.dtype == jnp.float32:
            names.append("amax")
            continue
        fits = [name for name in shapes if want in ("both", name) and shapes[name] == aval.shape and name not in names]
        if not fits or (len(fits) == 2 and sum(other.shape != () for other in avals) < 2):
            return None  # a square result, rows or columns
        names.append(fits[0])
        dtype = aval.dtype
    wanted: Want = "rows" if "rows" in names else "columns" if "columns" in names else "amax"
    return dtype, "both" if {"rows", "columns"} <= {*names} else wanted, tuple(names)


def _fusions(jaxpr: core.Jaxpr, implementation: str) -> tuple[dict[int, _Fusion], set[int]]:
    """Returns the fusions by the index of their quantization equation, and the indices of the equations that remain needed."""
    outermost = _Frame(jaxpr)
    found = {}
    calls = {i: eqn.invars[0] for i, eqn in enumerate(jaxpr.eqns) if _quantization(eqn) is not None}
    _, written = _needed(jaxpr, dict.fromkeys(calls, _Fusion(IDENTITY)))
    for i, x in calls.items():
        has_fast_kernel = implementation != "auto" or choose(aval_of(x).shape) != "xla"
        if len(aval_of(x).shape) != 2 or not has_fast_kernel:
            continue
        if fusion := _rotated(outermost, x, implementation) or _Search(outermost, x, written).fusion():
            found[i] = fusion
    while True:
        equations, variables = _needed(jaxpr, found)
        useless = [i for i in found if i in equations and variables.intersection(found[i].replaced)]
        if not useless:
            return found, equations
        for i in useless:  # Another equation needs the array in memory, so the kernel reads it from there.
            del found[i]


def _rotated(outermost: "_Frame", x: Atom, implementation: str) -> _Fusion | None:
    """Returns the fusion of the gradient of `rotated_heads`, if `x` is a view of it that the kernel supports."""
    atom, frame = x, outermost
    replaced = []
    while True:
        atom, frame = frame.resolve(atom)
        if isinstance(atom, core.Literal) or atom not in frame.definitions:
            return None
        eqn, index = frame.definitions[atom]
        if frame is outermost:
            replaced.append(atom)
        name = eqn.primitive.name
        if name in replay.JITS and eqn.params["name"] == GRADIENT:
            break
        if name in (*replay.JITS, *replay.CUSTOM) and _quantization(eqn) is None:
            frame = frame.inside(eqn)
            atom = frame.jaxpr.outvars[index]
        elif name in _VIEWS:
            atom = eqn.invars[0]
        else:
            return None
    found = [frame.resolve(v) for v in eqn.invars]
    avals: Any = [aval_of(v) for v, _ in found]
    parts = RotatedBack(*avals)  # in place of arrays, because only shapes are read
    is_outside = any(frame is not outermost and not replay.is_literal(v) for v, frame in found)
    if is_outside or parts.shape != aval_of(x).shape or (implementation == "auto" and not can_rotate(parts)):
        return None
    return _Fusion(None, tuple((v, aval_of(v).shape) for v, _ in found), tuple(replaced))


def _needed(jaxpr: core.Jaxpr, fusions: Mapping[int, _Fusion]) -> tuple[set[int], set[core.Var]]:
    """Returns the equations, by index, and the variables that the outputs depend on."""
    variables = {v for v in jaxpr.outvars if isinstance(v, core.Var)}
    equations = set[int]()
    for i, eqn in reversed(list(enumerate(jaxpr.eqns))):
        if eqn.effects or not variables.isdisjoint(eqn.outvars):
            equations.add(i)
            inputs = [*(v for v, _ in fusions[i].inputs), *eqn.invars[1:]] if i in fusions else eqn.invars
            variables.update(v for v in inputs if isinstance(v, core.Var))
    return equations, variables


@dataclass(frozen=True, eq=False)
class _Frame:
    """A call of a jaxpr."""

    jaxpr: core.Jaxpr
    # The caller's operand and frame of each input variable. Empty for the outermost frame.
    arguments: Mapping[core.Var, tuple[Atom, "_Frame"]] = field(default_factory=dict)
    calls: dict[int, "_Frame"] = field(default_factory=dict)  # by the id of the equation

    @cached_property
    def definitions(self) -> dict[core.Var, tuple[core.JaxprEqn, int]]:
        """Maps each variable to the equation that computes it, and the index of the result."""
        return {v: (eqn, i) for eqn in self.jaxpr.eqns for i, v in enumerate(eqn.outvars)}

    def inside(self, eqn: core.JaxprEqn) -> "_Frame":
        jaxpr = replay.body(eqn)
        arguments = {v: (operand, self) for v, operand in zip(jaxpr.invars, eqn.invars, strict=True)}
        return self.calls.setdefault(id(eqn), _Frame(jaxpr, arguments))

    def resolve(self, atom: Atom) -> tuple[Atom, "_Frame"]:
        """Follows `atom` through the arguments of calls to the variable or literal that defines it, and its frame."""
        frame = self
        while isinstance(atom, core.Var) and atom in frame.arguments:
            atom, frame = frame.arguments[atom]
        return atom, frame


class _NotFusibleError(Exception):
    """A kernel cannot compute the array from arrays in memory."""


@dataclass(eq=False)
class _Search:
    """Finds the elementwise function that computes a variable of the outermost frame."""

    outermost: _Frame
    target: Atom  # [M, N]
    written: set[core.Var]  # needed in memory even if all quantizations are fused
    inputs: list[tuple[Atom, _Shape]] = field(default_factory=list)  # during the search, input i is the operand -1 - i
    steps: list[tuple[str, tuple[Operand, ...]]] = field(default_factory=list)
    known: dict[tuple[_Frame, core.Var], Operand] = field(default_factory=dict)
    replaced: list[core.Var] = field(default_factory=list)  # with the value of `target`
    has_steps: bool = False  # true after the first operation, even if the operation cannot be a step

    @property
    def shape(self) -> _Shape:
        return aval_of(self.target).shape

    def fusion(self) -> _Fusion | None:
        """Returns the fusion. None if a kernel cannot compute the target, or if there is no operation to fuse."""
        try:
            self.follow(self.target, self.outermost)
        except _NotFusibleError:
            return None
        tiles = sum(shape == self.shape for _, shape in self.inputs)
        if not self.steps or not 0 < tiles <= _MAX_TILES:
            return None
        count = len(self.inputs)
        steps = tuple(
            (name, tuple(o if isinstance(o, float) else -1 - o if o < 0 else count + o for o in operands))
            for name, operands in self.steps
        )
        return _Fusion(Elementwise(count, steps), tuple(self.inputs), tuple(self.replaced))

    def follow(self, atom: Atom, frame: _Frame) -> Operand:
        """Returns the operand that stands for a variable or literal."""
        atom, frame = frame.resolve(atom)
        if isinstance(atom, core.Literal):
            if jnp.size(atom.val) != 1 or not jnp.issubdtype(aval_of(atom).dtype, jnp.floating):
                raise _NotFusibleError
            return float(atom.val)
        if (frame, atom) not in self.known:
            self.known[frame, atom] = self.define(atom, frame)
        return self.known[frame, atom]

    def read(self, atom: Atom, frame: _Frame, shape: _Shape) -> Operand:
        """Adds an argument that the kernel reads in the given shape. Returns its operand."""
        atom, frame = frame.resolve(atom)
        is_array = frame is self.outermost and not replay.is_literal(atom)
        if not is_array or aval_of(atom).dtype not in _FLOATS or aval_of(atom).size != math.prod(shape):
            raise _NotFusibleError
        self.inputs.append((atom, shape))
        return -len(self.inputs)

    def broadcast(self, atom: Atom, frame: _Frame, axes: Sequence[int], result: Aval) -> Operand:
        """Follows a broadcast constant, or reads a broadcast column or row."""
        if replay.is_literal(atom):
            return self.follow(atom, frame)
        rows, columns = self.shape
        small = aval_of(atom)
        last = len(result.shape) - 1
        width = small.shape[axes.index(last)] if last in axes else 1
        if result.size == rows * columns and result.shape[last] == columns:
            if small.size == rows and width == 1:
                return self.read(atom, frame, (rows, 1))
            if small.size == columns and width == columns:
                return self.read(atom, frame, (1, columns))
        raise _NotFusibleError

    def define(self, var: core.Var, frame: _Frame) -> Operand:
        eqn, index = frame.definitions.get(var, (None, 0))
        name, operands = ("", []) if eqn is None else (eqn.primitive.name, eqn.invars)
        aval = aval_of(var)
        is_whole = aval.size == math.prod(self.shape)
        is_written = self.has_steps and var in self.written and aval.dtype == jnp.bfloat16 and name not in _VIEWS
        if eqn is None or name in _WRITTEN or is_written:
            return self.read(var, frame, self.shape)
        if not self.has_steps and frame is self.outermost:
            self.replaced.append(var)
        if name in (*replay.JITS, *replay.CUSTOM) and _quantization(eqn) is None:
            inner = frame.inside(eqn)
            return self.follow(inner.jaxpr.outvars[index], inner)
        is_cast = name == "convert_element_type" and all(aval_of(v).dtype in _FLOATS for v in (var, *operands))
        if is_cast or (name in _VIEWS and aval_of(operands[0]).size == aval.size):
            return self.follow(operands[0], frame)
        if name == "broadcast_in_dim":
            return self.broadcast(operands[0], frame, eqn.params["broadcast_dimensions"], aval)
        self.has_steps = True
        if name == "integer_pow" and eqn.params["y"] > 0:
            power = base = self.follow(operands[0], frame)
            for _ in range(eqn.params["y"] - 1):
                power = self.step("mul", (power, base))
            return power
        if not can(name) or not is_whole:
            raise _NotFusibleError
        return self.step(name, [self.operand(v, frame, aval) for v in operands])

    def operand(self, atom: Atom, frame: _Frame, result: Aval) -> Operand:
        """Follows an operand of an operation that has the shape `result`. Axes of length 1 are broadcast."""
        if aval_of(atom).size == result.size:
            return self.follow(atom, frame)
        return self.broadcast(atom, frame, range(len(aval_of(atom).shape)), result)

    def step(self, name: str, operands: Sequence[Operand]) -> Operand:
        """Adds an operation. Returns the operand of its result."""
        self.steps.append((name, tuple(operands)))
        return len(self.steps) - 1
