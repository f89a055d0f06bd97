"""Predicts the temporary memory of a traced program from the lifetimes of its arrays. Compiles nothing.

XLA fuses elementwise operations into their readers, so most arrays of a jaxpr never exist in memory. In this model, an array is
stored if a matmul, a kernel, a reduction, a collective or a loop writes it, or if one of these (other than a reduction) reads
it. Any other array is computed where it is read, from stored arrays, which live until then. Arguments are not counted.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from jax.extend import core

from jgraph.autodiff.replay import CHECKPOINTS, CUSTOM, JITS, SCAN, Aval, aval_of, body, is_literal
from jgraph.kernels.grouped import CALLS as GROUPED
from jgraph.kernels.quantize import CALLS as QUANTIZED

Kind: TypeAlias = Literal["weight", "gradient", "activation"]
"""Computed from parameters only; with the shape of a parameter; everything else."""
KINDS: tuple[Kind, ...] = get_args(Kind)
Sizes: TypeAlias = dict[str, float]
"""Bytes by kind."""
Attention: TypeAlias = Literal["cudnn", "xla"]
"""Which attention runs on the GPU: cuDNN's does not store scores."""

_MATMULS = ("dot_general", "ragged_dot_general")
_LOOPS = (SCAN, "while", "cond")
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "ppermute")
_STORES = {*_MATMULS, *_LOOPS, *_COLLECTIVES, "conv_general_dilated", "pallas_call", "sort", "scatter", "scatter-add", "top_k"}
# These write their result to memory, and XLA computes their operands inside them.
_REDUCES = {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin", "cumsum", "gather"}
_ALIASES = {"reshape", "transpose", "squeeze", "expand_dims", "bitcast_convert_type", "copy", "name"}
_ALIASES |= {"optimization_barrier", "psum", "pvary"}
_INLINE = {*JITS, *CHECKPOINTS, *CUSTOM, "closed_call", "core_call", "shard_map"}
# Kernels in jitted functions. They read their operands from memory, except for the largest magnitude, which XLA computes.
_KERNELS = dict.fromkeys(GROUPED, "dot_general") | {
    name: "reduce_max" if want == "amax" else "pallas_call" for name, want in QUANTIZED.items()
}


@dataclass(eq=False)
class Stored:
    """An array in memory, from the operation `first` to the operation `last`."""

    shape: tuple[int, ...]
    nbytes: float
    kind: Kind
    first: int
    last: int
    use: Literal["operand", "key", "score", "other"] = "other"
    read: int = 0  # the first operation that reads it; 0 if none does


@dataclass(eq=False)
class _Value:
    """A variable: its own array in memory, or the arrays that it is computed from."""

    varies: bool  # with the batch
    roots: frozenset[Stored] = frozenset()
    is_resident: bool = False  # an argument of the program, or stored
    is_product: bool = False  # the result of a matmul


@dataclass(eq=False)
class Lifetimes:
    """The stored arrays of a jaxpr."""

    params: frozenset[tuple[int, ...]]  # shapes of parameters, of which gradients have one
    length: int  # tokens of a sequence
    attention: Attention
    arrays: list[Stored] = field(default_factory=list)
    time: int = 0
    width: int = 0  # of the residual stream: the last axis of the first look-up of rows
    _attended: list[tuple[Stored, list[Stored]]] = field(default_factory=list)  # results of matmuls with scores

    @classmethod
    def of(
        cls,
        closed: core.ClosedJaxpr,
        varying: Sequence[bool],
        *,
        params: frozenset[tuple[int, ...]],
        length: int,
        attention: Attention,
    ) -> "Lifetimes":
        """Reads a jaxpr. `varying` marks the arguments that depend on the batch."""
        found = cls(params, length, attention)
        results = found._run(closed.jaxpr, [_Value(varies, is_resident=True) for varies in varying])
        found._finish(zip(results, map(aval_of, closed.jaxpr.outvars), strict=True))
        return found

    def peaks(self, size: Callable[[Stored], float], *, gathers: Literal["early", "late"] = "early") -> list[Sizes]:
        """Returns the sizes by kind at three times. With late `gathers`, copies of parameters begin when they are first read.

        These are the peak until half of the results are written, the peak after that, and the time when the largest array
        is written, usually logits.
        """
        changes: list[Sizes] = [dict.fromkeys(KINDS, 0.0) for _ in range(self.time + 2)]
        for array in self.arrays:
            first = max(array.first, array.read) if array.kind == "weight" and gathers == "late" else array.first
            changes[first][array.kind] += size(array)
            changes[array.last + 1][array.kind] -= size(array)
        written = sorted(array.first for array in self.arrays if array.last == self.time)
        largest = max((a for a in self.arrays if a.kind == "activation"), key=lambda a: a.nbytes, default=None)
        begins = largest.first if largest else 0
        half = written[len(written) // 2] if written else 0
        none: Sizes = dict.fromkeys(KINDS, 0.0)
        alive, peaks = none, [none] * 3
        for time, change in enumerate(changes):
            alive = {kind: alive[kind] + change[kind] for kind in KINDS}
            peaks[time > half] = max(peaks[time > half], alive, key=lambda sizes: sum(sizes.values()))
            if time == begins:
                peaks[2] = alive
        return peaks

    def _run(self, jaxpr: core.Jaxpr, args: Sequence[_Value]) -> list[_Value]:
        env = dict(zip(jaxpr.invars, args, strict=True)) | {v: _Value(False, is_resident=True) for v in jaxpr.constvars}

        def read(atom: core.Var | core.Literal) -> _Value:
            return _Value(False, is_resident=True) if is_literal(atom) else env[atom]  # pyright: ignore[reportArgumentType]

        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, self._results(eqn, [read(v) for v in eqn.invars]), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _results(self, eqn: core.JaxprEqn, operands: list[_Value]) -> list[_Value]:
        name = eqn.primitive.name
        if name in JITS:
            name = _KERNELS.get(eqn.params["name"], name)
        if name in _INLINE:
            results = self._run(body(eqn), operands)
            if name == "shard_map":  # The shapes outside are those of all devices.
                self._keep(zip(results, map(aval_of, body(eqn).outvars), strict=True))
            return results
        if name in _ALIASES:
            return operands[: len(eqn.outvars)]
        self.time += 1
        if name == "reduce_scatter":
            return [self._scattered(operands[0], eqn)]
        if name in _STORES or name in _REDUCES:
            return self._stored(name, eqn, operands)
        if name in ("add", "add_any") and (product := _accumulated(eqn, operands)):
            return [product]
        roots = frozenset[Stored]().union(*(value.roots for value in operands))
        return [_Value(any(value.varies for value in operands), roots) for _ in eqn.outvars]

    def _stored(self, name: str, eqn: core.JaxprEqn, operands: list[_Value]) -> list[_Value]:
        """Returns the results of an operation that writes them to memory."""
        for value, v in zip(operands, eqn.invars, strict=True):
            self._read(value, aval_of(v), computed="before" if name in _STORES else "inside")
        # Operands are computed before the operation starts, so their own operands are gone.
        self.time += 1
        for value in operands if name in _STORES else ():
            _touch(value, self.time)
        if name in _LOOPS:
            self._add_inner(eqn)
        if name == "gather" and not self.width and aval_of(eqn.outvars[0]).ndim > 2:
            self.width = aval_of(eqn.outvars[0]).shape[-1]
        scores = [root for value in operands for root in value.roots if root.use == "score"]
        written = [self._written(aval_of(v), varies=any(value.varies for value in operands)) for v in eqn.outvars]
        for value in written:
            (array,) = value.roots
            value.is_product = name in _MATMULS
            if name in _MATMULS and array.kind == "gradient" and not all(operand.varies for operand in operands[:2]):
                array.kind = "activation"  # It has the shape of a parameter by chance.
            if scores:
                self._attended.append((array, scores))
            if name in _MATMULS and (scores or array.use == "score"):
                _mark_key(operands[1])
        return written

    def _scattered(self, value: _Value, eqn: core.JaxprEqn) -> _Value:
        """Returns the result of a reduce-scatter, which XLA starts when its operand is written, wherever the program has it."""
        written = max((root.first for root in value.roots), default=0) + 1
        result = self._written(aval_of(eqn.outvars[0]), varies=True)
        for root in result.roots:
            root.first = root.last = written
        _touch(value, written)
        return result

    def _read(self, value: _Value, aval: Aval, *, computed: Literal["before", "inside"], is_result: bool = False) -> None:
        """Reads an operand. If it is computed `before` the operation, it is stored."""
        _touch(value, self.time)
        if computed == "before" and not value.is_resident:
            value.roots, value.is_resident = self._written(aval, varies=value.varies).roots, True
            for root in value.roots:
                root.use = "operand" if root.use == "other" else root.use
                root.kind = "activation" if root.kind == "gradient" and not is_result else root.kind

    def _written(self, aval: Aval, *, varies: bool) -> _Value:
        shape = tuple(getattr(aval, "shape", ()))
        is_score = self.attention == "cudnn" and len(shape) >= 4 and shape.count(self.length) >= 2
        nbytes = 0 if is_score else aval.size * getattr(aval.dtype, "itemsize", 4)
        kind: Kind = "activation" if varies else "weight"
        if varies and self.params & {shape, shape[::-1]}:
            kind = "gradient"
        array = Stored(shape, nbytes, kind, self.time, self.time, "score" if is_score else "other")
        self.arrays.append(array)
        return _Value(varies, frozenset({array}), is_resident=True)

    def _add_inner(self, eqn: core.JaxprEqn) -> None:
        """Adds the temporaries of a loop body or a branch at its peak, as arrays that live during the operation."""
        for inner in core.jaxprs_in_params(eqn.params):
            nested = Lifetimes(self.params, self.length, self.attention)
            nested._finish(
                zip(
                    nested._run(inner, [_Value(True, is_resident=True) for _ in inner.invars]),
                    map(aval_of, inner.outvars),
                    strict=True,
                )
            )
            times = {array.first for array in nested.arrays}
            alive = [[a for a in nested.arrays if a.first <= time <= a.last] for time in times]
            largest = max(alive, key=lambda arrays: sum(a.nbytes for a in arrays), default=[])
            self.arrays += [Stored(a.shape, a.nbytes, a.kind, self.time, self.time, a.use) for a in largest]

    def _finish(self, results: Iterable[tuple[_Value, Aval]]) -> None:
        self.time += 1
        for array, scores in self._attended:
            # The gradient of cuDNN's attention reads its result instead of the scores.
            array.last = max(array.last, *(score.last for score in scores))
        self._keep(results)

    def _keep(self, results: Iterable[tuple[_Value, Aval]]) -> None:
        """Stores results. A matmul writes the dtype of the result that is computed from it alone."""
        for value, aval in results:
            _touch(value, self.time)
            if value.is_resident:
                continue
            (root, *others) = value.roots or (None,)
            if root is not None and not others and math.prod(root.shape) == aval.size:
                root.nbytes, value.is_resident = aval.size * aval.dtype.itemsize, True
            else:
                self._read(value, aval, computed="before", is_result=True)


def _touch(value: _Value, time: int) -> None:
    for root in value.roots:
        root.last = max(root.last, time)
        root.read = root.read or time


def _mark_key(value: _Value) -> None:
    for root in value.roots:
        root.use = "key" if root.use == "operand" else root.use


def _accumulated(eqn: core.JaxprEqn, operands: list[_Value]) -> _Value | None:
    """Returns the sum of a matmul and another array, which the matmul writes in place of its result; None for others."""
    size = aval_of(eqn.outvars[0]).size
    products = [value for value in operands if value.is_product and all(math.prod(root.shape) == size for root in value.roots)]
    if not products or aval_of(eqn.outvars[0]).ndim < 2:
        return None
    # XLA adds as soon as it can, also if the program adds a list of results at its end.
    (product,) = products[-1].roots
    for value in operands:
        _touch(value, product.first)
    return products[-1]
