"""Reports the command buffers, donations and memory of a compiled program, for a present or an absent GPU."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jgraph.errors import ConfigError
from jgraph.types import Leaf, Tree
from jgraph.xla import aot
from jgraph.xla._buffers import Buffers, show_bytes
from jgraph.xla._capture import CaptureReport, compile_and_report
from jgraph.xla.donation import UNUSABLE, Donation, donations, without_warning
from jgraph.xla.hlo import COLLECTIVES, HloModule, Instruction
from jgraph.xla.options import OptionValue

_MOST_SHOWN = 8
_GRAPH_NOTE = (
    "`graph` full is compiler_options=jgraph.compiler_options('full', platform='gpu'); "
    "`xla_options` name=value are more entries of this dictionary"
)


@dataclass(frozen=True)
class Memory:
    """Memory of a program on one device in bytes, as reported by XLA. `str` formats it in one line.

    Attributes:
        arguments: Size of the arguments, with donated ones.
        outputs: Size of the results, with those in donated buffers.
        aliased: Size of the results in donated buffers.
        temporaries: Peak size of the buffers that are neither arguments nor results.
        host: Size of the arguments and temporaries in host memory, which the other attributes and `total` do not contain. 0 on
            a CPU, where `arguments` contains them.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    host: int = 0

    @classmethod
    def read(cls, compiled: jax.stages.Compiled) -> "Memory | None":
        """Reads XLA's memory analysis of a compiled program.

        Args:
            compiled: The program, from `jax.jit(fn).lower(*args).compile()`.

        Returns:
            The memory, or None if XLA does not report it.
        """
        found = compiled.memory_analysis()
        names = ("argument", "output", "alias", "temp", "host_argument", "host_temp")
        sizes = [] if found is None else [getattr(found, f"{name}_size_in_bytes") for name in names]
        return cls(*sizes[:4], host=sum(sizes[4:])) if sizes else None

    @property
    def total(self) -> int:
        """Peak memory in bytes: arguments + outputs - aliased + temporaries, so that each buffer counts once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries

    def to_dict(self) -> dict[str, int]:
        """Returns the attributes and `total` by name."""
        return dataclasses.asdict(self) | {"total": self.total}

    def __str__(self) -> str:
        parts = dataclasses.asdict(self) | {"together": self.total}
        host = parts.pop("host")
        parts |= {"in host memory": host} if host else {}
        return ", ".join(f"{name} {show_bytes(number)}" for name, number in parts.items())


@dataclass(frozen=True)
class FP8Products:
    """Counts of FP8 matmuls in a program compiled for a GPU. `str` formats them in one line."""

    products: int  # matmul calls with two FP8 operands, such as those of cuBLASLt
    transposes: int  # instructions with an FP8 result, which XLA added; each is a pass over memory

    @classmethod
    def count(cls, compiled: jax.stages.Compiled) -> "FP8Products":
        text = compiled.as_text() or ""
        if "f8e" not in text:  # parsing a whole program takes seconds
            return cls(0, 0)
        instructions = HloModule(text).instructions

        def is_fp8(name: str) -> bool:
            return name in instructions and instructions[name].shapes[0].dtype.startswith("f8")

        def is_matmul(call: Instruction) -> bool:
            return call.opcode == "custom-call" and sum(map(is_fp8, call.operands)) in (2, 4)

        transposes = sum(i.opcode == "transpose" and is_fp8(i.name) for i in instructions.values())
        return cls(sum(map(is_matmul, instructions.values())), transposes)

    def __str__(self) -> str:
        return f"fp8: {self.products} products, {self.transposes} transposes by XLA"


@dataclass(frozen=True)
class Collectives:
    """Counts of the collectives in a program compiled for a GPU. `str` formats them in one line."""

    total: int  # as `HloModule.collectives` counts them
    overlapped: int  # a matmul (library call, Pallas kernel or fusion with a dot) runs between their start and end

    @classmethod
    def count(cls, compiled: jax.stages.Compiled) -> "Collectives":
        text = compiled.as_text() or ""
        if not any(f" {kind}{end}(" in text for kind in COLLECTIVES for end in ("", "-start")):  # parsing takes seconds
            return cls(0, 0)
        module = HloModule(text)
        products = {
            name for name, part in module.computations.items() if any(_is_product(i) for i in part.instructions.values())
        }
        overlapped = 0
        for part in module.computations.values():
            running: dict[str, bool] = {}  # started collectives, and True if a matmul runs meanwhile
            for name, instruction in part.instructions.items():
                if instruction.opcode.endswith("-done"):
                    overlapped += any(running.pop(operand, False) for operand in instruction.operands)
                elif instruction.opcode.endswith("-start") and instruction.opcode.removesuffix("-start") in COLLECTIVES:
                    running[name] = False
                elif running and (_is_product(instruction) or products & set(instruction.called)):
                    running = dict.fromkeys(running, True)
        return cls(module.collectives.total(), overlapped)

    def __str__(self) -> str:
        return f"collectives: {self.total}, {self.overlapped} overlapped by matmuls"


def _is_product(instruction: Instruction) -> bool:
    """True for a matmul, for attention of cuDNN and for a Pallas kernel."""
    return instruction.is_matmul or instruction.is_attention or instruction.target.startswith("mosaic_gpu")


@dataclass(frozen=True)
class Explanation:
    """The report of `explain`. `str` formats it.

    Attributes:
        name: The name of the function.
        device: JAX's `device_kind` of the GPU or CPU that the function was compiled for.
        capture: The thunks (XLA's units of execution, such as kernels) inside and outside of command buffers (XLA's name for
            CUDA graphs). None if unknown; `notes` has the reason.
        donations: One entry per donated argument leaf, with the output that reuses its buffer.
        memory: Device memory in bytes. None if XLA does not report it.
        buffers: The largest temporary buffers that are in use when the program needs the most memory, largest sum first.
            Buffers of equal shape and source line are one entry. Empty on a CPU.
        fp8: Counts of the FP8 matmuls.
        collectives: Counts of the collectives between devices.
        notes: Sentences about the limits of the report.
    """

    name: str
    device: str
    capture: CaptureReport | None
    donations: tuple[Donation, ...]
    memory: Memory | None
    buffers: tuple[Buffers, ...] = ()
    fp8: FP8Products = FP8Products(0, 0)
    collectives: Collectives = Collectives(0, 0)
    notes: tuple[str, ...] = ()

    @property
    def dropped(self) -> tuple[Donation, ...]:
        """The entries of `donations` without an output: JAX or XLA dropped the donation, so it saves no memory."""
        return tuple(donation for donation in self.donations if not donation.output)

    def to_json(self) -> str:
        """Returns the report as the text of a JSON object.

        The keys are name, device, capture, donations, memory, buffers, fp8, collectives and notes. Nested dataclasses are
        objects with their fields as keys; `memory` also has the key total. None becomes null.
        """
        fields = dataclasses.asdict(self)
        if self.memory is not None:
            fields["memory"] = self.memory.to_dict()
        return json.dumps(fields)

    def __str__(self) -> str:
        lines = [f"{self.name} on {self.device}"]
        if self.capture is not None:
            lines.append(str(self.capture))
        lines += _donation_lines(self)
        if self.memory is not None:
            lines.append(f"memory: {self.memory}")
        if self.buffers:
            lines += ["largest temporaries at the peak:", *(f"  {group}" for group in self.buffers)]
        if self.fp8.products:
            lines.append(str(self.fp8))
        if self.collectives.total:
            lines.append(str(self.collectives))
        if self.capture is not None and any("`graph` full" in o.remedy for o in self.capture.outside):
            lines.append(f"note: {_GRAPH_NOTE}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def explain(
    fn: Callable[..., Any],
    *args: Any,
    donate_argnums: int | Sequence[int] = (),
    target: str | None = None,
    compiler_options: Mapping[str, OptionValue] | None = None,
) -> Explanation:
    """Compiles a function and reports its command buffers, donated buffers and memory. Does not run it.

    Args:
        fn: A function, or a jitted function: from `jax.jit`, `jgraph.jit`, Flax's `nnx.jit`, Equinox's `filter_jit`, or another
            wrapper of `jax.jit` with a method `lower`.
        *args: The positional arguments of `fn`: pytrees of arrays or `jax.ShapeDtypeStruct`. Only the shapes,
            dtypes and shardings of arrays are used, and no array is donated. A static argument of a jitted `fn` is its value.
        donate_argnums: Indices of the positional arguments to donate. Only for a function that is not jitted; a jitted function
            has the `donate_argnums` that were passed to `jax.jit`.
        target: `h200`, `h100` or `b200` to compile for that GPU without having one. None: the first of `jax.devices()`. Arrays
            on a mesh count as arrays on as many of these GPUs. If the program itself names present devices in its shardings,
            it must be for one device.
        compiler_options: XLA options by name, from `jgraph.compiler_options`. None for XLA's defaults.

    Returns:
        The report; `print` shows it as text. JAX's warning about donations that were not usable is suppressed.

    Raises:
        ConfigError: If `fn` is not a function, or `donate_argnums` is passed for a jitted function.
        CompilerOptionError: If XLA refuses an option.
        TargetError: If the target is unknown, its compiler is not installed, or compiling the program needs a GPU.

    Examples:
        >>> report = jgraph.explain(lambda state, x: state + x, jnp.zeros(4), jnp.ones(4), donate_argnums=0)  # print it
        >>> report.dropped  # donated leaves that no output reuses
        ()
    """
    if not callable(fn):
        raise ConfigError(f"`fn` is {type(fn).__name__}: must be a function", field="fn")
    jitted: Any = fn
    if not hasattr(fn, "lower"):
        jitted = jax.jit(fn, donate_argnums=donate_argnums)
    elif donate_argnums not in ((), []):
        raise ConfigError("`donate_argnums` must be left out for a jitted function: pass it to jax.jit", field="donate_argnums")
    with without_warning(UNUSABLE):
        lowered, names = _lower(jitted, args, target)
    return _report(lowered, names, compiler_options or {}, name=getattr(fn, "__name__", type(fn).__name__), target=target)


def report(traced: jax.stages.Traced, compiler_options: Mapping[str, OptionValue], *, name: str) -> Explanation:
    """Compiles a traced function and reports as `explain` does."""
    with without_warning(UNUSABLE):
        lowered = traced.lower()
    return _report(lowered, argument_names(traced, lowered), compiler_options, name=name)


def _lower(jitted: Any, args: Sequence[Tree], target: str | None) -> tuple[jax.stages.Lowered, list[str]]:
    """Lowers a jitted function. Returns the program and the paths of its argument leaves."""
    if not hasattr(jitted, "trace"):
        jitted, names, args = _as_jax_jit(jitted, args)
        return _lower(jitted, args, target)[0], names
    names: list[str] = []
    if target is None:
        traced = jitted.trace(*args)
        lowered = traced.lower()
    else:
        try:
            traced, lowered = aot.lower(jitted, args, gpu=target)
        except (ValueError, AttributeError):
            # A ValueError: the program names present devices in its shardings. An AttributeError: it computes constants while
            # it is traced, with `jax.set_mesh`. An error of the function itself is raised again by the next trace.
            if not aot.is_on_mesh(args) or not isinstance(traced := jitted.trace(*args), jax.stages.Traced):
                raise
            names = argument_names(traced, traced)
            traced, lowered = aot.lower(*aot.released(jitted, args, gpu=target), gpu=target)
    lowered = getattr(lowered, "lowered", lowered)  # nnx.jit wraps the stages of JAX
    return lowered, names or argument_names(traced, lowered)


def _as_jax_jit(wrapper: Callable[..., Any], args: Sequence[Tree]) -> tuple[jax.stages.Wrapped, list[str], list[Leaf]]:
    """Converts a jitted function of any leaves, such as Equinox's, to (one of arrays, paths of the arrays, arrays)."""
    paths, structure = jax.tree_util.tree_flatten_with_path(args)
    leaves = [leaf for _, leaf in paths]
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)]

    def call(*arrays: Leaf) -> Tree:
        given = dict(zip(at, arrays, strict=True))
        result = wrapper(*jax.tree.unflatten(structure, [given.get(i, leaf) for i, leaf in enumerate(leaves)]))
        return jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else None, result)

    arrays = [leaves[i] for i in at]
    jaxpr = jax.jit(call).trace(*arrays).jaxpr.jaxpr
    is_donated = {
        variable: donated
        for equation in jaxpr.eqns
        for variable, donated in zip(equation.invars, equation.params.get("donated_invars", ()), strict=False)
    }
    donated = [i for i, variable in enumerate(jaxpr.invars) if is_donated.get(variable)]
    names = ["args" + jax.tree_util.keystr(paths[i][0]) for i in at]
    return jax.jit(call, donate_argnums=donated), names, arrays


def _report(
    lowered: jax.stages.Lowered,
    names: Sequence[str],
    compiler_options: Mapping[str, OptionValue],
    *,
    name: str,
    target: str | None = None,
) -> Explanation:
    device = aot.devices(gpu=target)[0] if target else jax.devices()[0]
    compiled, capture = (aot.compile_lowered if target else compile_and_report)(lowered, compiler_options)
    return Explanation(
        name=name,
        device=device.device_kind + (", which is not here" if target else ""),
        capture=capture,
        donations=donations(lowered, compiled, names),
        memory=Memory.read(compiled),
        buffers=capture.buffers if capture else (),
        fp8=FP8Products.count(compiled),
        collectives=Collectives.count(compiled),
        notes=tuple(_notes(capture, target)),
    )


def _notes(capture: CaptureReport | None, target: str | None) -> Iterator[str]:
    platform = jax.default_backend()
    if target is not None:
        yield "compiled without the GPU: matmuls are not autotuned, so kernels may differ from those on one"
    if capture is None and platform in ("gpu", "cuda"):
        yield "XLA dumped no thunks: XLA_FLAGS disables dumps, or jax's persistent compilation cache had the program"
    elif capture is None:
        yield f"there are no command buffers on a {platform}: use target='h200' for the report of a GPU"


def argument_names(traced: jax.stages.Traced, lowered: jax.stages.Lowered | jax.stages.Traced) -> list[str]:
    """Returns the paths of argument leaves, e.g. `state['w']`, or `args[0]['w']` if the function has no argument names."""
    infos, _ = jax.tree_util.tree_flatten_with_path(lowered.args_info)
    # A wrapper of a trace may lack the attribute.
    jaxpr: Any = getattr(traced, "jaxpr", None)
    names = jaxpr and jaxpr.jaxpr.debug_info.arg_names
    if names is not None and len(names) == len(infos) and all(names):
        return list(names)
    return [("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:]) for path, _ in infos]


def _donation_lines(report: Explanation) -> Iterator[str]:
    found = report.donations
    if not found:
        yield "donated: nothing"
        return
    reused = [donation for donation in found if donation.output]
    leaves = f"{len(found)} {'leaf' if len(found) == 1 else 'leaves'} of {show_bytes(sum(d.nbytes for d in found))}"
    yield f"donated: {leaves}: {len(reused)} reused, {len(report.dropped)} dropped"
    yield from (f"  {donation}" for donation in (*report.dropped, *reused[:_MOST_SHOWN]))
    if len(reused) > _MOST_SHOWN:
        yield f"  and {len(reused) - _MOST_SHOWN} more"
