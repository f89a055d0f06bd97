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
    """A tensor in a Hugging Face folder, and its position in a parameter of the model. Used to read and to write.

    A parameter may have leading axes that the tensor lacks, such as layers or experts. The tensor then fills one index of each
    of these axes. For example, the tensor of layer 3 with shape (8, 16) is at `start` (3, 0, 0) of a parameter with shape
    (12, 8, 16).

    Attributes:
        tensor: Name of the tensor.
        shape: Shape of the tensor in the folder.
        start: Index of the tensor's first element in the parameter, a tuple of one integer per axis of the parameter.
        order: `same`: the tensor's axes are in the order of the parameter's last axes. `transposed`: they are reversed.
    """

    tensor: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    order: AxisOrder = "same"

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The tensor's shape in the axis order of the parameter: `shape`, reversed if `order` is `transposed`. A property."""
        return self.shape[::-1] if self.order == "transposed" else self.shape

    @property
    def box(self) -> Box:
        """The tensor's position in the parameter: a tuple of one slice per axis of the parameter. A property."""
        sizes = (1,) * (len(self.start) - len(self.shape)) + self.own_shape
        return tuple(slice(start, start + size) for start, size in zip(self.start, sizes, strict=True))


@dataclass(frozen=True)
class HuggingFace:
    """Maps one family of models to Hugging Face folders and back. A model class has it as its attribute `hugging_face`.

    Settings are the dataclass that the model class is built from.

    Attributes:
        settings: `settings(config)` is called with the content of config.json, a dict. It returns a dict of the settings that
            config.json determines, by field name, with a dict for a nested dataclass. It raises ConfigError for a model that
            the family does not contain. `jgraph.interop.fields` has functions to read fields with their types.
        config: `config(settings, base)` is called for an export. It returns the content of the new config.json, a dict. Fields
            that the settings do not determine are taken from `base`, a dict. For a model that was loaded from a folder, `base`
            is the config.json of that folder. Otherwise it has only the field `max_position_embeddings`. `config` raises
            ConfigError for settings that no architecture of Hugging Face has.
        tensors: `tensors(settings)` yields (parameter name, `Part`) for every tensor. The parts of a parameter must fill it. It
            must be lazy: a folder is checked tensor by tensor, so that wrong sizes in config.json cost no time or memory.
        ignored: `ignored(settings)` returns shell patterns of the names of tensors that a folder may contain in addition. They
            are not read.
        copies: `copies(settings)` returns the tensors that a folder may contain although they equal another tensor: a dict from
            their names to the names of the others. They are compared.
    """

    settings: Callable[[Mapping[str, Any]], dict[str, Any]]
    config: Callable[[Any, Mapping[str, Any]], dict[str, Any]]
    tensors: Callable[[Any], Iterable[tuple[str, Part]]]
    ignored: Callable[[Any], Sequence[str]]
    copies: Callable[[Any], Mapping[str, str]] = lambda settings: {}

    def parts(self, settings: Any) -> dict[str, tuple[Part, ...]]:
        """Collects what `tensors(settings)` yields, by parameter.

        Args:
            settings: Settings of the model.

        Returns:
            A dict of a tuple of `Part`s for every parameter name, such as `blocks/0/mlp/up/kernel`. Names and parts are in the
            order of `tensors`.
        """
        found: dict[str, list[Part]] = {}
        for name, part in self.tensors(settings):
            found.setdefault(name, []).append(part)
        return {name: tuple(parts) for name, parts in found.items()}


def side_by_side(
    tensors: Mapping[str, tuple[int, ...]], *, order: AxisOrder = "same", lead: tuple[int, ...] = ()
) -> tuple[Part, ...]:
    """Returns the parts of a parameter that is the concatenation of tensors along the last axis of the parameter.

    With the order `transposed`, the axes of the tensors are reversed before the concatenation.

    Args:
        tensors: Shapes of the tensors in the folder, by name, in the order of the concatenation. All have the same number of
            axes.
        order: `same` if the folder stores the axes in the order of the parameter. `transposed` if it stores them in reverse,
            such as [out, in] for a parameter [in, out].
        lead: If the parameter has leading axes that the tensors lack: the index of the tensors on each of these axes, such as
            (layer,) or (layer, expert).

    Returns:
        One `Part` per tensor, in the same order.
    """
    parts, start = [], 0
    for name, shape in tensors.items():
        part = Part(name, shape, (*lead, *(0,) * (len(shape) - 1), start), order)
        parts.append(part)
        start += part.own_shape[-1]
    return tuple(parts)


def check_filled(parts: Mapping[str, Sequence[Part]], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Asserts that the parts of every parameter are inside the parameter and together have as many elements.

    Does not check that parts do not overlap.

    Args:
        parts: Parts of every parameter, by parameter name.
        shapes: Shapes of the parameters, by name.

    Raises:
        AssertionError: If `parts` and `shapes` have different names, or the parts of a parameter are not inside it or have
            another number of elements. The attribute `hugging_face` of the model class is then wrong.
    """
    assert parts.keys() == shapes.keys(), "the model's `hugging_face` lacks a parameter, or has an unknown one"
    for name, shape in shapes.items():
        boxes = [part.box for part in parts[name]]
        inside = all(len(box) == len(shape) and all(map(lambda part, size: part.stop <= size, box, shape)) for box in boxes)
        fills = inside and sum(math.prod(part.shape) for part in parts[name]) == math.prod(shape)
        assert fills, "the tensors do not fill their parameter"
