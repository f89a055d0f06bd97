"""XLA options of a compiled step: which command buffers, and whatever the user adds, refused early when XLA lacks them.

XLA tells of a wrong option only while it compiles, after the model was built and traced, and does not say which names or values
it has. Option names come and go between releases, so a list kept here would be wrong soon; the installed library knows its own.
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

Graph = Literal["auto", "off", "full"]
OptionValue: TypeAlias = str | bool | int | float
OptionKind = Literal["bool", "int32", "int64", "float", "string", "enum", "message"]

COMMAND_BUFFER = "xla_gpu_enable_command_buffer"
MIN_GRAPH_SIZE = "xla_gpu_graph_min_graph_size"

# No training step computes on the host.
_NEVER_CAPTURED = {"INVALID", "HOST_EXECUTE"}
# A graph that has both a collective and a branch cannot be instantiated (CUDA_ERROR_INVALID_VALUE), so it is one or the other.
_COLLECTIVES, _BRANCHES = {"COLLECTIVES", "COLLECTIVES_KERNEL"}, {"CONDITIONAL", "WHILE"}
# XLA's own kernels for small all-reduces; in a graph it is NCCL's or none.
_SMALL_COLLECTIVES = "xla_gpu_experimental_use_collective_kernels"
# What every release that jgraph supports can record; used only when the installed library does not tell.
_COMMON = "FUSION,COLLECTIVES,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION,CONVOLUTION"


@dataclass(frozen=True)
class Option:
    """One field of XLA's DebugOptions, e.g. `xla_gpu_graph_min_graph_size`.

    A `message` cannot be set from a text. A repeated one takes several values, separated by commas, instead of XLA's default.
    `values` are the names that an `enum` may take, empty where the library keeps them elsewhere.
    """

    name: str
    kind: OptionKind
    repeated: bool
    values: tuple[str, ...] = ()


def compiler_options(
    graph: str, xla_options: Sequence[str] = (), *, platform: str, num_devices: int = 1
) -> dict[str, OptionValue]:
    """Returns XLA options by name, for `jax.stages.Lowered.compile(compiler_options=...)`. Starts no backend, imports no jax.

    Args:
        graph: which command buffers (CUDA graphs) XLA records. `auto` leaves its default; `off` records nothing; `full` records
            everything, on several devices the collectives too, and then loops and branches as their pieces.
        xla_options: further `name=value` options; they win over those of `graph`.
        platform: `cpu`, or `gpu`/`cuda`. Command buffers exist on a GPU only, so on a CPU `graph` adds nothing.
        num_devices: that the program runs on.

    Raises:
        ConfigError: `graph` is none of the three.
        CompilerOptionError: an option or its value is not one the installed XLA has.
    """
    check_choice("graph", graph, get_args(Graph))
    options: dict[str, OptionValue] = {}
    if platform in ("gpu", "cuda"):
        options |= _graph_options(graph, num_devices)
    for text in xla_options:
        name, equals, value = text.strip().partition("=")
        if not equals:
            raise _refused(f"has {text!r}: must be name=value")
        options[name] = check_option(name, value)
    return options


def _graph_options(graph: str, num_devices: int) -> dict[str, OptionValue]:
    if graph == "auto":
        return {}
    if graph == "off":
        return {COMMAND_BUFFER: ""}  # no value replaces the default set by an empty one
    installed = installed_options() or {}
    commands = installed[COMMAND_BUFFER].values if COMMAND_BUFFER in installed else _COMMON.split(",")
    left_out = _NEVER_CAPTURED | (_COLLECTIVES if num_devices == 1 else _BRANCHES)
    options: dict[str, OptionValue] = {COMMAND_BUFFER: ",".join(c for c in commands if c not in left_out), MIN_GRAPH_SIZE: 1}
    if num_devices > 1 and _SMALL_COLLECTIVES in installed:
        options[_SMALL_COLLECTIVES] = "" if installed[_SMALL_COLLECTIVES].repeated else False
    return options


def check_option(name: str, value: str) -> OptionValue:
    """Returns the value of an option in the type that XLA wants; the text itself where the library does not tell its options.

    Args:
        name: an XLA option without dashes.
        value: `true` or `false` for a bool, commas between several values.

    Raises:
        CompilerOptionError: with the closest name, the type, or the allowed values.
    """
    known = installed_options()
    if known is None:
        return value
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise _refused(f"names {name}, which the installed XLA does not have{hint}")
    option = known[name]
    if option.kind == "message":
        raise _refused(f"sets {name}, which holds a structure and cannot be set from a text")
    if option.repeated:
        for item in value.split(",") if value else ():
            _convert(option, item)
        return value
    return _convert(option, value)


def _convert(option: Option, value: str) -> OptionValue:
    try:
        match option.kind:
            case "bool":
                return {"true": True, "1": True, "false": False, "0": False}[value.lower()]
            case "int32" | "int64":
                number, limit = int(value), 2 ** (int(option.kind[3:]) - 1)
                if not -limit <= number < limit:
                    raise ValueError
                return number
            case "float":
                return float(value)
            case "enum" if option.values and value not in option.values:
                raise ValueError
            case _:
                return value
    except (KeyError, ValueError):
        allowed = {"bool": "true or false", "enum": "one of " + ", ".join(option.values)}
        allowed = allowed.get(option.kind, f"of type {option.kind}")
        raise _refused(f"sets {option.name} to {value!r}: must be {allowed}") from None


def _refused(what: str) -> CompilerOptionError:
    return CompilerOptionError(f"`xla_options` {what}", field="xla_options")


@contextlib.contextmanager
def option_errors() -> Iterator[None]:
    """Turns XLA's own complaint about an option into a CompilerOptionError, around `compile()`; other errors pass.

    Needed where the installed library does not tell its options, and for limits that only XLA knows.
    """
    try:
        yield
    except RuntimeError as e:  # jax.errors.JaxRuntimeError is one; naming it would import jax here
        if complaint := re.search(r"No such compile option: .*|While setting option .*", str(e)):
            raise CompilerOptionError(f"XLA refuses an option: {complaint[0]}", field="xla_options") from e
        raise


@functools.cache
def installed_options() -> Mapping[str, Option] | None:
    """Returns every option of the installed XLA by name, or None where the library does not tell. 30 ms, once a process."""
    descriptor = _descriptor_of_installed_xla()
    if descriptor is None:
        return None
    message = next(_submessages(descriptor, 4, b"DebugOptions"))
    enums = dict(_enums(message, 4, ".xla.DebugOptions.")) | dict(_enums(descriptor, 5, ".xla."))
    options = (_option(field, enums) for field in _submessages(message, 2))
    return types.MappingProxyType({option.name: option for option in options})


def known(options: Sequence[str], platform: str) -> tuple[str, ...]:
    """Returns those of some `name=value` that the installed XLA has, for a GPU; none for another platform."""
    installed = installed_options() or {} if platform in ("gpu", "cuda") else {}
    return tuple(option for option in options if option.partition("=")[0] in installed)


# --- The descriptor. Field numbers are those of google/protobuf/descriptor.proto, which are fixed for good. ---

_Fields: TypeAlias = list[tuple[int, bytes | int]]
_KINDS: dict[int, OptionKind] = {1: "float", 2: "float", 3: "int64", 5: "int32", 8: "bool", 11: "message", 14: "enum"}


def _descriptor_of_installed_xla() -> _Fields | None:
    """Returns fields of the FileDescriptorProto of xla/xla.proto inside jaxlib's shared library; None when it is not there.

    No public function of jax lists XLA's options. The protocol buffer runtime needs this descriptor for XLA's own lookup of
    option names, so the library has to carry it: this is the same list that XLA will check against, only earlier. It is still
    a private artefact. Everything that relies on it is this function, and without it options are checked by XLA alone.
    """
    spec = importlib.util.find_spec("jaxlib")
    library = Path(next(iter(spec.submodule_search_locations or ()), "")) / "libjax_common.so" if spec else None
    if library is None or not library.is_file():
        return None
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = data.find(b"\n\x0dxla/xla.proto")  # field 1, 13 bytes: the file's name, first thing in its descriptor
        if start < 0:
            return None
        descriptor = _fields(data[start : start + 2**20])
    return descriptor if next(_submessages(descriptor, 4, b"DebugOptions"), None) else None


def _fields(data: bytes) -> _Fields:
    """Reads (number, value) of each field of a message. Ends where no message can go on: the length is not stored with it."""
    fields: _Fields = []
    position = number = 0
    while position < len(data):
        key, position = _varint(data, position)
        previous, number = number, key >> 3
        # Serialized in order of field number, so a smaller one (0 included) belongs to whatever comes after this message.
        if number < max(previous, 1) or key & 7 not in (0, 2):
            break
        value, position = _varint(data, position)
        if key & 7 == 2:
            value, position = data[position : position + value], position + value
        fields.append((number, value))
    return fields


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value, shift, position = value | (byte & 127) << shift, shift + 7, position + 1
        if byte < 128:
            return value, position


def _submessages(fields: _Fields, tag: int, name: bytes | None = None) -> Iterator[_Fields]:
    for number, value in fields:
        if number == tag and isinstance(value, bytes):
            inner = _fields(value)
            if name is None or inner[0] == (1, name):
                yield inner


def _enums(fields: _Fields, tag: int, prefix: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    for enum in _submessages(fields, tag):
        yield prefix + _text(enum, 1), tuple(_text(value, 1) for value in _submessages(enum, 2))


def _option(field: _Fields, enums: Mapping[str, tuple[str, ...]]) -> Option:
    numbers = dict(field)
    kind = _KINDS.get(numbers[5] if isinstance(numbers[5], int) else 0, "string")
    return Option(_text(field, 1), kind, numbers[4] == 3, enums.get(_text(field, 6), ()) if kind == "enum" else ())


def _text(fields: _Fields, tag: int) -> str:
    value = dict(fields).get(tag, b"")
    return value.decode() if isinstance(value, bytes) else ""
