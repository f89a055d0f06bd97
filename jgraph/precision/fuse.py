"""Lets the kernel that quantizes an array compute it too: GELU, SwiGLU, their gradients, whatever lies between two products.

XLA cannot fuse into a kernel that is not its own: it would write the array, which the kernel then reads. After differentiation
forward and backward are one trace, and what an operand of an FP8 product is made of can be followed in it back to the results
of other products. If nothing else needs the operand, it is never written.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend import core
from jax.typing import DTypeLike

from jgraph.autodiff import replay
from jgraph.kernels.elementwise import IDENTITY, Computed, Elementwise, Operand, can
from jgraph.kernels.quantize import CALLS, Want, cast_transpose, choose, has_kernel
from jgraph.scopes import scope

_MOST = 4  # inputs of a kernel, whose tiles have to fit into shared memory
_FLOATS = (jnp.bfloat16, jnp.float32)
_RESULTS = ("optimization_barrier", "dot_general")
"""What a kernel may read besides arguments of the program: results that are written anyway."""
_VIEWS = ("reshape", "copy")


def fused(fn: Callable[..., Any], implementation: str = "auto") -> Callable[..., Any]:
    """Returns a function of arrays that computes what it quantizes in the kernels that quantize it, where it can.

    To be put around a function and its differentiation, and to be jitted. Results differ by the rounding of what was bfloat16
    and is float32 now. Loops inside it stay as they are, and of `jax.checkpoint` what is made again.

    Args:
        fn: quantizes by `kernels.cast_transpose`.
        implementation: of the kernels; `auto` leaves everything as it is where XLA would be taken.
    """

    @wraps(fn)
    def run(*args: Any) -> Any:
        if implementation == "auto" and not has_kernel():
            return fn(*args)
        closed, out = jax.make_jaxpr(fn, return_shape=True)(*args)
        leaves = jax.tree.leaves(args)
        if any(map(_is_open, closed.jaxpr.eqns)):
            closed = jax.make_jaxpr(lambda *leaves, whole=closed: _opened(whole.jaxpr, whole.consts, leaves))(*leaves)
        fusions, alive = _fusions(closed.jaxpr, implementation)
        env = replay.environment(closed.jaxpr, closed.consts, leaves)
        read = replay.reader(env)
        for i, eqn in enumerate(closed.jaxpr.eqns):
            if i not in alive:
                continue
            if i in fusions:
                out_values = fusions[i].run(read, eqn, implementation)
            else:
                out_values = replay.apply(eqn, [read(v) for v in eqn.invars])
            replay.write(env, eqn.outvars, out_values)
        return jax.tree.unflatten(jax.tree.structure(out), [read(v) for v in closed.jaxpr.outvars])

    return run


def _is_open(eqn: core.JaxprEqn) -> bool:
    """Returns whether an equation is a `jax.checkpoint` that is compiled as its body, with no barrier before it."""
    return eqn.primitive.name in replay.CHECKPOINTS and not (eqn.params["differentiated"] and np.any(eqn.params["prevent_cse"]))


def _opened(jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Runs a jaxpr, and such equations in it as their bodies."""
    env = replay.environment(jaxpr, consts, args)
    read = replay.reader(env)
    for eqn in jaxpr.eqns:
        values = [read(v) for v in eqn.invars]
        opened = _is_open(eqn)
        out = _opened(replay.body(eqn), replay.body_consts(eqn), values) if opened else replay.apply(eqn, values)
        replay.write(env, eqn.outvars, out)
    return [read(v) for v in jaxpr.outvars]


@dataclass(frozen=True)
class _Fusion:
    """Says what a call of `cast_transpose` or `amax` computes itself.

    Attributes:
        fn: the function.
        inputs: variables that it is of, and the shape in which each is given to the kernel: whole, a column or a row.
        instead: variables with its result, which then need not be there.
    """

    fn: Elementwise
    inputs: tuple[tuple[Any, tuple[int, ...]], ...]
    instead: tuple[Any, ...]

    def run(self, read: Callable[[Any], Array], eqn: Any, implementation: str) -> list[Array]:
        """Returns what the equation does."""
        wanted = _asked(eqn)
        assert wanted is not None, "only such calls are fused"
        dtype, want, results = wanted
        scale = jnp.float32(1) if want == "amax" and len(eqn.invars) == 1 else read(eqn.invars[1])
        inputs = tuple(read(v).reshape(of) for v, of in self.inputs)
        with scope("quantize"):
            found = cast_transpose(Computed(self.fn, inputs), scale, dtype, want=want, implementation=implementation)
        return [getattr(found, name) for name in results]


def _asked(eqn: core.JaxprEqn) -> tuple[DTypeLike, Want, tuple[str, ...]] | None:
    """Returns the dtype and the `want` of a call of `cast_transpose` or `amax`, and which parts of the result it gives.

    Those that nobody reads may have been left out of the trace. None for other equations, and where rows and columns have one
    shape and only one of them is there.
    """
    want = CALLS.get(eqn.params.get("name", "")) if eqn.primitive.name in replay.JITS else None
    if want is None or len(eqn.invars) > 2:  # those of a plain array, into no slot
        return None
    avals: list[Any] = [v.aval for v in (eqn.invars[0], *eqn.outvars)]
    shape = avals.pop(0).shape
    shapes, found, dtype = {"rows": shape, "columns": shape[::-1]}, [], jnp.dtype(jnp.float8_e4m3fn)
    for aval in avals:
        if aval.shape == () and aval.dtype == jnp.float32:
            found.append("amax")
            continue
        fits = [name for name in shapes if want in ("both", name) and shapes[name] == aval.shape and name not in found]
        if not fits or (fits == [*shapes] and sum(other.shape != () for other in avals) < 2):
            return None
        found.append(fits[0])
        dtype = aval.dtype
    arrays: list[Any] = [name for name in shapes if name in found]
    return dtype, "both" if len(arrays) == 2 else arrays[0] if arrays else "amax", tuple(found)


def _fusions(jaxpr: core.Jaxpr, implementation: str) -> tuple[dict[int, _Fusion], set[int]]:
    """Returns the fusions, by the numbers of their equations, and the numbers of all equations that are needed with them."""
    whole, found = _Frame(jaxpr), {}
    calls: dict[int, Any] = {i: eqn.invars[0] for i, eqn in enumerate(jaxpr.eqns) if _asked(eqn) is not None}
    _, written = _needed(jaxpr, dict.fromkeys(calls, _Fusion(IDENTITY, (), ())))
    for i, x in calls.items():
        kernel = implementation != "auto" or choose(x.aval.shape) != "xla"
        if len(x.aval.shape) == 2 and kernel and (fusion := _Chain(whole, x, written).fusion()):
            found[i] = fusion
    while True:
        alive, variables = _needed(jaxpr, found)
        there = [i for i in found if i in alive and variables.intersection(found[i].instead)]
        if not there:
            return found, alive
        for i in there:  # somebody else needs the array, so it can as well be read
            del found[i]


def _needed(jaxpr: core.Jaxpr, fusions: Mapping[int, _Fusion]) -> tuple[set[int], set[Any]]:
    """Returns the equations and the variables that are needed."""
    variables, equations = {v for v in jaxpr.outvars if not replay.is_literal(v)}, set()
    for i, eqn in reversed(list(enumerate(jaxpr.eqns))):
        if eqn.effects or not variables.isdisjoint(eqn.outvars):
            equations.add(i)
            inputs = [*(v for v, _ in fusions[i].inputs), *eqn.invars[1:]] if i in fusions else eqn.invars
            variables.update(v for v in inputs if not replay.is_literal(v))
    return equations, variables


@dataclass(frozen=True, eq=False)
class _Frame:
    """A jaxpr, or one that a call in it runs.

    Attributes:
        jaxpr: the jaxpr.
        bound: what its arguments are in the frame around it; empty for the outermost.
    """

    jaxpr: core.Jaxpr
    bound: Mapping[Any, tuple[Any, "_Frame"]] = field(default_factory=dict)

    @cached_property
    def definitions(self) -> dict[Any, tuple[core.JaxprEqn, int]]:
        """Gives, for each variable, the equation that it is a result of, and which result."""
        return {v: (eqn, i) for eqn in self.jaxpr.eqns for i, v in enumerate(eqn.outvars)}

    @cached_property
    def _inner(self) -> dict[int, "_Frame"]:
        return {}

    def inside(self, eqn: core.JaxprEqn) -> "_Frame":
        """Returns the frame of a call."""
        if id(eqn) not in self._inner:
            jaxpr = replay.body(eqn)
            bound = {v: (outer, self) for v, outer in zip(jaxpr.invars, eqn.invars, strict=True)}
            self._inner[id(eqn)] = _Frame(jaxpr, bound)
        return self._inner[id(eqn)]

    def outermost(self, atom: Any) -> tuple[Any, "_Frame"]:
        """Returns what a variable of this frame is where it is defined."""
        frame = self
        while not replay.is_literal(atom) and atom in frame.bound:
            atom, frame = frame.bound[atom]
        return atom, frame


class _CannotError(Exception):
    """The array is not a function that a kernel can compute of arrays that are there."""


@dataclass(eq=False)
class _Chain:
    """Follows a variable of the outermost jaxpr to what it is computed of.

    Attributes:
        whole: the outermost jaxpr.
        of: the variable, [M, N].
        written: variables that are needed even if every such one is computed where it is quantized.
        inputs, steps: what is found.
        known: values of variables.
        instead: variables that are the same array as `of`.
        computed: if an operation was met.
    """

    whole: _Frame
    of: Any
    written: set[Any]
    inputs: list[tuple[Any, tuple[int, ...]]] = field(default_factory=list)
    steps: list[tuple[str, tuple[Operand, ...]]] = field(default_factory=list)
    known: dict[tuple[_Frame, Any], Operand] = field(default_factory=dict)
    instead: list[Any] = field(default_factory=list)
    computed: bool = False

    def fusion(self) -> _Fusion | None:
        """Returns what is to be computed; None if there is nothing to gain, or no way."""
        try:
            self.follow(self.of, self.whole)
        except _CannotError:
            return None
        tiles = sum(shape == self.of.aval.shape for _, shape in self.inputs)
        if not self.steps or not 0 < tiles <= _MOST:
            return None
        # Inputs were counted as negative numbers, from the last one on.
        count = len(self.inputs)
        steps = tuple(
            (name, tuple(o if isinstance(o, float) else -1 - o if o < 0 else count + o for o in operands))
            for name, operands in self.steps
        )
        return _Fusion(Elementwise(count, steps), tuple(self.inputs), tuple(self.instead))

    def follow(self, atom: Any, frame: _Frame) -> Operand:
        """Returns the value that a variable or literal has."""
        atom, frame = frame.outermost(atom)
        if replay.is_literal(atom):
            if jnp.size(atom.val) != 1 or not jnp.issubdtype(atom.aval.dtype, jnp.floating):
                raise _CannotError
            return float(atom.val)
        if (frame, atom) not in self.known:
            self.known[frame, atom] = self.define(atom, frame)
        return self.known[frame, atom]

    def read(self, atom: Any, frame: _Frame, shape: tuple[int, ...]) -> Operand:
        """Makes an array an input, in a shape."""
        atom, frame = frame.outermost(atom)
        if frame is not self.whole or replay.is_literal(atom) or atom.aval.dtype not in _FLOATS:
            raise _CannotError
        assert atom.aval.size == math.prod(shape), "it has as many elements"
        self.inputs.append((atom, shape))
        return -len(self.inputs)

    def broadcast(self, atom: Any, frame: _Frame, axes: Sequence[int], result: Any) -> Operand:
        """Follows a constant that is broadcast to an array, or reads a column or a row that is."""
        if replay.is_literal(atom):
            return self.follow(atom, frame)
        (rows, columns), small, last = self.of.aval.shape, atom.aval, len(result.shape) - 1
        width = small.shape[axes.index(last)] if last in axes else 1
        if result.size == rows * columns and result.shape[last] == columns:
            if small.size == rows and width == 1:
                return self.read(atom, frame, (rows, 1))
            if small.size == columns and width == columns:
                return self.read(atom, frame, (1, columns))
        raise _CannotError

    def define(self, var: Any, frame: _Frame) -> Operand:
        """Follows a variable through the equation that it is a result of."""
        eqn, which = frame.definitions.get(var, (None, 0))
        operands: list[Any] = [] if eqn is None else eqn.invars
        name = eqn.primitive.name if eqn is not None else ""
        whole = var.aval.size == self.of.aval.size
        written = self.computed and var in self.written and var.aval.dtype == jnp.bfloat16
        if eqn is None or name in _RESULTS or (written and name not in _VIEWS):
            if not whole:
                raise _CannotError
            return self.read(var, frame, self.of.aval.shape)
        if not self.computed and frame is self.whole:
            self.instead.append(var)
        if name in (*replay.JITS, *replay.CUSTOM) and _asked(eqn) is None:
            inner = frame.inside(eqn)
            return self.follow(inner.jaxpr.outvars[which], inner)
        if name == "convert_element_type" and all(v.aval.dtype in _FLOATS for v in (var, *operands)):
            return self.follow(operands[0], frame)
        if name in _VIEWS and operands[0].aval.size == var.aval.size:
            return self.follow(operands[0], frame)
        if name == "broadcast_in_dim":
            return self.broadcast(operands[0], frame, eqn.params["broadcast_dimensions"], var.aval)
        self.computed = True
        if name == "integer_pow" and eqn.params["y"] > 0:
            power = base = self.follow(operands[0], frame)
            for _ in range(eqn.params["y"] - 1):
                power = self.step("mul", (power, base))
            return power
        if not can(name) or not whole:
            raise _CannotError
        return self.step(name, [self.operand(v, frame, var.aval) for v in operands])

    def operand(self, atom: Any, frame: _Frame, result: Any) -> Operand:
        """Follows an operand of an operation, which may broadcast axes of length 1 by itself."""
        if atom.aval.size == result.size:
            return self.follow(atom, frame)
        return self.broadcast(atom, frame, range(len(atom.aval.shape)), result)

    def step(self, name: str, operands: Sequence[Operand]) -> Operand:
        """Adds an operation, and returns its value."""
        self.steps.append((name, tuple(operands)))
        return len(self.steps) - 1
