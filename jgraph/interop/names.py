"""Maps the parameters and settings of a model to those of a Hugging Face folder. No jax here.

A model class that supports such folders has a `HuggingFace` as its attribute `hugging_face`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Box: TypeAlias = tuple[slice, ...]
# The axes of a tensor are in the order of the last axes of the parameter, or reversed, as in [out, in] for [in, out].
AxisOrder: TypeAlias = Literal["same", "transposed"]


@dataclass(frozen=True)
class Part:
    """A tensor in a Hugging Face folder, and its position in a parameter of the model. Used to read and to write.

    A parameter may have leading axes that the tensor lacks, such as layers or experts. The tensor then fills one index of each:
    the tensor of layer 3 with shape (8, 16) is at `start` (3, 0, 0) of a parameter with shape (12, 8, 16).
    """

    tensor: str
    shape: tuple[int, ...]  # in the folder
    start: tuple[int, ...]  # of the first element of the tensor: one index per axis of the parameter
    order: AxisOrder = "same"

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of the tensor in the axis order of the parameter."""
        return self.shape[::-1] if self.order == "transposed" else self.shape

    @property
    def box(self) -> Box:
        """The position of the tensor in the parameter, one slice per axis of the parameter."""
        sizes = (1,) * (len(self.start) - len(self.shape)) + self.own_shape
        return tuple(slice(start, start + size) for start, size in zip(self.start, sizes, strict=True))


@dataclass(frozen=True)
class HuggingFace:
    """Maps one family of models to Hugging Face folders and back, as the attribute `hugging_face` of a model class.

    `settings` of the functions are the dataclass that the model class is built from.
    """

    # From the content of config.json to the settings that it determines, by field name, with a dict for a nested dataclass.
    # Raises ConfigError for a model that the family does not contain. `jgraph.interop.fields` has functions that read fields.
    settings: Callable[[Mapping[str, Any]], dict[str, Any]]
    # `config(settings, base)` returns the content of the config.json of an export. Fields that the settings do not determine
    # come from `base`: the config.json of the folder that the model was loaded from, else a dict with
    # `max_position_embeddings` only. Raises ConfigError for settings that no architecture of Hugging Face has.
    config: Callable[[Any, Mapping[str, Any]], dict[str, Any]]
    # Yields (parameter name, `Part`) for every tensor of a model. The parts of a parameter must fill it. Must be lazy: a folder
    # is checked tensor by tensor, so that wrong sizes in config.json cost no time or memory.
    tensors: Callable[[Any], Iterable[tuple[str, Part]]]
    # Shell patterns of the names of tensors that a folder may contain in addition. They are not read.
    ignored: Callable[[Any], Sequence[str]]
    # Tensors that a folder may contain although they equal another tensor, each with the name of the other. They are compared.
    copies: Callable[[Any], Mapping[str, str]] = lambda settings: {}

    def parts(self, settings: Any) -> dict[str, tuple[Part, ...]]:
        """Collects what `tensors(settings)` yields, by parameter name such as `blocks/0/mlp/up/kernel`, in its order."""
        found: dict[str, list[Part]] = {}
        for name, part in self.tensors(settings):
            found.setdefault(name, []).append(part)
        return {name: tuple(parts) for name, parts in found.items()}


def side_by_side(
    tensors: Mapping[str, tuple[int, ...]], *, order: AxisOrder = "same", lead: tuple[int, ...] = ()
) -> tuple[Part, ...]:
    """Returns the parts of a parameter that concatenates tensors along its last axis, in the order of `tensors`."""
    # `lead` is the index of the tensors on leading axes of the parameter, such as (layer, expert). All tensors have the same
    # number of axes.
    parts = []
    start = 0
    for name, shape in tensors.items():
        part = Part(name, shape, (*lead, *(0,) * (len(shape) - 1), start), order)
        parts.append(part)
        start += part.own_shape[-1]
    return tuple(parts)


def check_filled(parts: Mapping[str, Sequence[Part]], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Asserts that the parts of every parameter are inside it and have as many elements. They may still overlap."""
    # An assertion that fails is a fault of the attribute `hugging_face` of the model class.
    assert parts.keys() == shapes.keys(), "the model's `hugging_face` lacks a parameter, or has an unknown one"
    for name, shape in shapes.items():
        boxes = [part.box for part in parts[name]]
        inside = all(len(box) == len(shape) and all(map(lambda part, size: part.stop <= size, box, shape)) for box in boxes)
        fills = inside and sum(math.prod(part.shape) for part in parts[name]) == math.prod(shape)
        assert fills, "the tensors do not fill their parameter"
