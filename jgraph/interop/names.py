"""How a model's parameters and settings are called in a Hugging Face folder. No jax here.

A model that can come from such a folder, and go into one, has a `HuggingFace` as its class's attribute `hugging_face`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Box = tuple[slice, ...]


@dataclass(frozen=True)
class Part:
    """A tensor of a folder, and its place in one of our parameters. Reading and writing both go by it.

    Attributes:
        tensor: its name.
        shape: its shape, as the folder has it.
        start: of its place in our parameter, by axis. Axes that the tensor lacks come first and count layers and experts.
        order: whether its axes are in the `same` order as ours, or it is `transposed`.
    """

    tensor: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    order: str = "same"

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Its shape with its axes in our order."""
        return self.shape[::-1] if self.order == "transposed" else self.shape

    @property
    def box(self) -> Box:
        """Its place in our parameter, as slices."""
        sizes = (1,) * (len(self.start) - len(self.shape)) + self.own_shape
        return tuple(slice(start, start + size) for start, size in zip(self.start, sizes, strict=True))


@dataclass(frozen=True)
class HuggingFace:
    """Maps one family of models to Hugging Face folders and back.

    Attributes:
        settings: `settings(config)` returns the settings that a config.json determines, nested settings as a dict. Raises
            ConfigError for a model that the family does not contain. `jgraph.interop.fields` reads fields with their types.
        config: `config(settings, base)` returns the config.json of a model; other fields come from `base`. Raises ConfigError
            for settings that no architecture has.
        tensors: `tensors(settings)` yields (parameter name, `Part`) for every tensor. The parts of a parameter fill it. It must
            be lazy: a folder is checked tensor by tensor, so that wrong sizes in config.json cost no time or memory.
        ignored: `ignored(settings)` returns patterns of tensors that a folder may contain in addition.
    """

    settings: Callable[[Mapping[str, Any]], dict[str, Any]]
    config: Callable[[Any, Mapping[str, Any]], dict[str, Any]]
    tensors: Callable[[Any], Iterable[tuple[str, Part]]]
    ignored: Callable[[Any], Sequence[str]]

    def parts(self, settings: Any) -> dict[str, tuple[Part, ...]]:
        """Returns the parts of every parameter, by parameter name."""
        found: dict[str, list[Part]] = {}
        for name, part in self.tensors(settings):
            found.setdefault(name, []).append(part)
        return {name: tuple(own) for name, own in found.items()}


def side_by_side(
    tensors: Mapping[str, tuple[int, ...]], *, order: str = "same", lead: tuple[int, ...] = ()
) -> tuple[Part, ...]:
    """Returns the parts of a parameter whose last axis holds tensors one after another.

    Args:
        tensors: shapes by name, as the folder has them.
        order: as `Part` has it.
        lead: the place on axes that count layers and experts.
    """
    parts, place = [], 0
    for name, shape in tensors.items():
        part = Part(name, shape, (*lead, *(0,) * (len(shape) - 1), place), order)
        parts.append(part)
        place += part.own_shape[-1]
    return tuple(parts)


def check_filled(parts: Mapping[str, Sequence[Part]], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Asserts that the parts fill the parameters of a model: a `HuggingFace` that does not fit its model is a bug."""
    assert parts.keys() == shapes.keys(), "a model's names for a folder leave a parameter out, or have one more"
    assert all(_fill(parts[name], shape) for name, shape in shapes.items()), "tensors do not fill their parameter"


def _fill(parts: Sequence[Part], shape: tuple[int, ...]) -> bool:
    """Returns True if the parts are inside a parameter of this shape and have as many elements."""
    inside = all(len(part.start) == len(shape) for part in parts) and all(
        box.stop <= size for part in parts for box, size in zip(part.box, shape, strict=True)
    )
    return inside and sum(math.prod(part.shape) for part in parts) == math.prod(shape)
