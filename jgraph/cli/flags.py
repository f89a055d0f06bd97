"""What the subcommands share: flags that may be left out, and writing to a file that was named."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from jgraph.errors import ConfigError

T = TypeVar("T")


def optional(kind: Callable[[str], T], metavar: str) -> PrimitiveConstructorSpec[T | None]:
    """A flag that may be left out. tyro shows `int | None` as `{None}|INT`, and its errors are as long."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: kind(words[0]),
        is_instance=lambda value: value is None or not isinstance(value, str),
        str_from_instance=lambda value: [str(value)],
    )


Count = Annotated[int | None, optional(int, "INT"), tyro.conf.arg(help_behavior_hint="")]
Name = Annotated[str | None, optional(str, "NAME"), tyro.conf.arg(help_behavior_hint="")]
File = Annotated[Path | None, optional(Path, "FILE"), tyro.conf.arg(help_behavior_hint="")]


def write_file(flag: str, path: Path, write: Callable[[Path], Any]) -> None:
    try:
        write(path)
    except OSError as e:
        raise ConfigError(f"{flag} {path} cannot be written: {e.strerror or e}", field=flag.strip("-")) from None
