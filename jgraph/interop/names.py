"""Maps the parameters and settings of a model to those of a Hugging Face folder. No jax here.

A model class that supports such folders has a `HuggingFace` as its attribute `hugging_face`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Box: TypeAlias = tuple[slice, ...]
AxisOrder: TypeAlias = Literal["same", "transposed"]


@dataclass(frozen=True)
class Part:
    """A tensor in a folder, and its position in a parameter of the model. Used to read and to write.

    Attributes:
        tensor: Name of the tensor.
        shape: Shape of the tensor in the folder.
        start: Index of its first element on each axis of the parameter. The tensor may lack the leading axes of layers and
            experts.
        order: Whether its axes have the `same` order as the axes of the parameter, or are `transposed`.
    """

    tensor: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    order: AxisOrder = "same"

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Its shape in the axis order of the parameter."""
        return self.shape[::-1] if self.order == "transposed" else self.shape

    @property
    def box(self) -> Box:
        """Its position in the parameter, as slices."""
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
        return {name: tuple(parts) for name, parts in found.items()}


def side_by_side(
    tensors: Mapping[str, tuple[int, ...]], *, order: AxisOrder = "same", lead: tuple[int, ...] = ()
) -> tuple[Part, ...]:
    """Returns the parts of a parameter that concatenates tensors along its last axis.

    Args:
        tensors: Shapes in the folder, by name.
        order: Axis order of the tensors, as in `Part`.
        lead: Indices on the leading axes of layers and experts.

    Returns:
        One part per tensor.
    """
    parts, start = [], 0
    for name, shape in tensors.items():
        part = Part(name, shape, (*lead, *(0,) * (len(shape) - 1), start), order)
        parts.append(part)
        start += part.own_shape[-1]
    return tuple(parts)


def check_filled(parts: Mapping[str, Sequence[Part]], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Asserts that the parts fill the parameters of a model.

    Args:
        parts: Parts of every parameter, by parameter name.
        shapes: Shapes of the parameters, by name.

    Raises:
        AssertionError: If they do not. The `HuggingFace` of the model is then wrong.
    """
    assert parts.keys() == shapes.keys(), "the model's `hugging_face` lacks a parameter, or has an unknown one"
    for name, shape in shapes.items():
        boxes = [part.box for part in parts[name]]
        inside = all(len(box) == len(shape) and all(map(lambda part, size: part.stop <= size, box, shape)) for box in boxes)
        fills = inside and sum(math.prod(part.shape) for part in parts[name]) == math.prod(shape)
        assert fills, "the tensors do not fill their parameter"
