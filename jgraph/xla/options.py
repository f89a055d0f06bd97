"""XLA options of a compiled program: command buffers, and the user's options. Checks names of options before compilation.

XLA reports a wrong name only during compilation and does not list the valid ones. Names change between releases, so they are
read from the installed library.
"""

import contextlib
import difflib
import functools
import importlib.util
import mmap
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from jgraph.errors import CompilerOptionError, check_choice
from jgraph.xla import _protobuf

OptionValue: TypeAlias = str | bool | int | float
Graph: TypeAlias = Literal["auto", "off", "full"]

_COMMAND_BUFFER = "xla_gpu_enable_command_buffer"
_MIN_GRAPH_SIZE = "xla_gpu_graph_min_graph_size"
# CUDA cannot instantiate a graph with both a collective and a branch (CUDA_ERROR_INVALID_VALUE).
_COLLECTIVES = {"COLLECTIVES", "COLLECTIVES_KERNEL"}
_BRANCHES = {"CONDITIONAL", "WHILE"}
_NEVER_CAPTURED = {"INVALID", "HOST_EXECUTE"}
# XLA's own kernels for small all-reduces cannot be captured. Without them XLA calls NCCL.
_SMALL_COLLECTIVES = "xla_gpu_experimental_use_collective_kernels"
# Copies between GPUs start after their host threads have met, which a graph cannot record. XLA calls NCCL instead.
_PERMUTES, _BY_NCCL = "xla_gpu_collective_permute_mode", "COLLECTIVES_PRIVATE_MEMORY"
# Commands of every supported XLA release, in case the installed library does not list its own.
_COMMON = "FUSION,COLLECTIVES,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION,CONVOLUTION"


@dataclass(frozen=True)
class _Option:
    """A field of XLA's DebugOptions, e.g. `xla_gpu_graph_min_graph_size`."""

    is_bool: bool
    repeated: bool  # takes several values, separated by commas, which replace XLA's default
    values: tuple[str, ...] = ()  # of an enum; empty for other types, and if the library does not list them


def compiler_options(
    graph: str = "auto", xla_options: Sequence[str] = (), *, platform: str | None = None, num_devices: int | None = None
) -> dict[str, OptionValue]:
    """Returns XLA options for `jax.jit(compiler_options=...)` or `Lowered.compile`.

    Args:
        graph: The command buffers (CUDA graphs) that XLA records. `auto`: XLA's default. `off`: none. `full`: every thunk (unit
            of execution, such as a kernel) that XLA has a command for. On one device these include loops and branches; on
            several devices they include collectives instead, because CUDA cannot combine the two.
        xla_options: Further options as texts `name=value`, e.g. `xla_gpu_graph_min_graph_size=1`. A later one overrides an
            earlier one and those of `graph`.
        platform: `cpu`, `gpu` or `cuda`. `graph` has no effect on a CPU. None for the default backend of JAX, which starts.
        num_devices: The number of devices that run the program. None for all devices of the default backend if `platform` is
            None, otherwise one.

    Returns:
        A new dictionary of option values by name. In `xla_options`, the values true, false, 1 and 0 of bool options become
        bools, if the installed XLA lists its options; all other values stay strings.

    Raises:
        ConfigError: If `graph` is not `auto`, `off` or `full`.
        CompilerOptionError: If an option is not `name=value`, or the installed XLA does not have it. Values are not checked
            here; XLA checks them when it compiles.

    Examples:
        >>> step = jax.jit(lambda x: 2 * x, compiler_options=jgraph.compiler_options("full"))
    """
    check_choice("graph", graph, get_args(Graph))
    if platform is None:
        import jax  # here, because importing JAX is slow and `platform` makes it unnecessary

        platform = jax.default_backend()
        num_devices = num_devices or jax.device_count()
    options = _graph_options(graph, num_devices or 1) if platform in ("gpu", "cuda") else {}
    for text in xla_options:
        name, equals, value = text.strip().partition("=")
        if not equals:
            raise _error(f"has {text!r}: must be name=value")
        options[name] = _checked(name, value)
    return options


def known(options: Sequence[str], platform: str) -> tuple[str, ...]:
    """Selects the texts `name=value` with an option that the installed XLA has. Empty on a CPU. Does not check values."""
    installed = installed_options() or {} if platform in ("gpu", "cuda") else {}
    return tuple(option for option in options if option.partition("=")[0] in installed)


@contextlib.contextmanager
def option_errors() -> Iterator[None]:
    """Converts XLA's error about an option into a CompilerOptionError, in a `with` block around compilation."""
    # XLA checks names and values of options when it compiles.
    try:
        yield
    except RuntimeError as e:  # JaxRuntimeError is a subclass; its name would require importing JAX
        if complaint := re.search(r"No such compile option: .*|While setting option .*", str(e)):
            raise CompilerOptionError(f"XLA refuses an option: {complaint[0]}", field="xla_options") from e
        raise


@functools.cache  # the first call takes 30 ms
def installed_options() -> Mapping[str, _Option] | None:
    """Returns every option of the installed XLA by name, read-only. None if jaxlib is absent or does not list them."""
    descriptor = _debug_options_descriptor()
    if descriptor is None:
        return None
    message = next(found for found in _protobuf.submessages(descriptor, 4) if found[0] == (1, b"DebugOptions"))
    enums = _enums(message, 4, ".xla.DebugOptions.") | _enums(descriptor, 5, ".xla.")
    return types.MappingProxyType(
        {_protobuf.text(field, 1): _option(field, enums) for field in _protobuf.submessages(message, 2)}
    )


def _graph_options(graph: str, num_devices: int) -> dict[str, OptionValue]:
    if graph == "auto":
        return {}
    if graph == "off":
        return {_COMMAND_BUFFER: ""}  # replaces the default commands by an empty set
    installed = installed_options() or {}
    commands = installed[_COMMAND_BUFFER].values if _COMMAND_BUFFER in installed else _COMMON.split(",")
    excluded = _NEVER_CAPTURED | (_COLLECTIVES if num_devices == 1 else _BRANCHES)
    options: dict[str, OptionValue] = {_COMMAND_BUFFER: ",".join(c for c in commands if c not in excluded), _MIN_GRAPH_SIZE: 1}
    if num_devices > 1 and _SMALL_COLLECTIVES in installed:
        options[_SMALL_COLLECTIVES] = "" if installed[_SMALL_COLLECTIVES].repeated else False
    if num_devices > 1 and _PERMUTES in installed:
        options[_PERMUTES] = _BY_NCCL
    return options


def _checked(name: str, value: str) -> OptionValue:
    """Returns the value for XLA, which parses strings. Raises CompilerOptionError if the installed XLA has no such option."""
    installed = installed_options()
    if installed is None:
        return value
    if name not in installed:
        close = difflib.get_close_matches(name, installed, n=1, cutoff=0.75)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise _error(f"names {name}, which the installed XLA does not have{hint}")
    # XLA parses only `True` and `False`.
    bools: dict[str, OptionValue] = {"true": True, "1": True, "false": False, "0": False}
    return bools.get(value.lower(), value) if installed[name].is_bool else value


def _error(problem: str) -> CompilerOptionError:
    return CompilerOptionError(f"`xla_options` {problem}", field="xla_options")


# --- The descriptor of DebugOptions. Field numbers are those of google/protobuf/descriptor.proto. ---

_BOOL, _ENUM, _REPEATED = 8, 14, 3


def _debug_options_descriptor() -> _protobuf.Fields | None:
    """Returns the FileDescriptorProto of xla/xla.proto in jaxlib's shared library, or None if it is not found."""
    # No public function of JAX lists XLA's options. The library contains this descriptor because XLA looks up option names in
    # it. Only this function depends on that. Without the descriptor, XLA alone checks options.
    spec = importlib.util.find_spec("jaxlib")
    library = Path(next(iter(spec.submodule_search_locations or ()), "")) / "libjax_common.so" if spec else None
    if library is None or not library.is_file():
        return None
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = data.find(b"\n\x0dxla/xla.proto")  # field 1 of the descriptor: the file name, 13 bytes
        descriptor = _protobuf.fields(data[start : start + 2**20]) if start >= 0 else []
    return descriptor if any(found[0] == (1, b"DebugOptions") for found in _protobuf.submessages(descriptor, 4)) else None


def _enums(message: _protobuf.Fields, number: int, prefix: str) -> dict[str, tuple[str, ...]]:
    """Maps the qualified name of each enum in field `number` to the names of its values."""
    return {
        prefix + _protobuf.text(enum, 1): tuple(_protobuf.text(value, 1) for value in _protobuf.submessages(enum, 2))
        for enum in _protobuf.submessages(message, number)
    }


def _option(field: _protobuf.Fields, enums: Mapping[str, tuple[str, ...]]) -> _Option:
    kind = _protobuf.integer(field, 5)
    values = enums.get(_protobuf.text(field, 6), ()) if kind == _ENUM else ()
    return _Option(kind == _BOOL, _protobuf.integer(field, 4) == _REPEATED, values)
