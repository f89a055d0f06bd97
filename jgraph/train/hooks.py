"""The protocol of a user's model class, and its hooks: optional members that the application reads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from jax import Array

from jgraph.errors import ConfigError, check_types
from jgraph.interop import HuggingFace
from jgraph.modules import Decoder
from jgraph.pipeline import PipelineModel
from jgraph.strategies import Split
from jgraph.train.model import ModelSettings, find_model, present


class Model(Protocol):
    """A model class: a Flax NNX or Linen module that `python -m jgraph.train` can train.

    Only `loss` is required. Every other member is optional, which a Protocol cannot express, and None counts as missing.
    `ModelHooks` has the defaults of the members of the class.
    """

    splits_sequences: ClassVar[bool]
    """True if `loss` computes the tokens of its device on the mesh axis `context`. If missing, `--cp` is refused."""

    hugging_face: ClassVar[HuggingFace]
    """Maps models of the class to Hugging Face folders and back. If missing, folders cannot be read or written."""

    remat: Literal["nothing", "layer", "offload"]
    """Activations to recompute in the backward pass, an attribute of NNX modules with the initial value `nothing`.

    `--remat` sets it before the model is traced. For `offload`, the model passes `jax.checkpoint` a policy that keeps results
    in host memory, such as `jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")`. If missing,
    `--remat layer` and `offload` are refused, except `layer` in a pipeline.
    """

    @staticmethod
    def tensor_rules(config: ModelSettings | None) -> Mapping[str, Split | None]:
        """Describes how `--tp` splits parameters, and which parts of a parameter get a LoRA adapter of their own.

        If missing, Flax's partition names with the axis `tensor` apply, which is not enough in a pipeline.

        Args:
            config: Settings of the model; None for a model without settings.

        Returns:
            The argument `rules` of `jgraph.TensorParallel`, by the shell pattern of parameter names.
        """
        ...

    @staticmethod
    def pipeline_model(config: ModelSettings | None, ranks: int) -> PipelineModel:
        """Makes the model for a pipeline. If missing, `--pp` is refused.

        Args:
            config: Settings of the model; None for a model without settings.
            ranks: Number of ranks of the pipeline.

        Returns:
            The model as embedding, layers and head, with the parameters of the module.
        """
        ...

    def loss(self, batch: Array | dict[str, Array]) -> Array:
        """Computes the mean next-token loss.

        Args:
            batch: int32 token ids [B, S], B sequences with S - 1 predictions each. With separate documents, a dict with the
                arrays `tokens`, `starts` and `weights` of `jgraph.data`.

        Returns:
            A floating scalar.
        """
        ...

    def logits(self, tokens_BT: Array) -> Array:
        """Computes logits, to generate and score text. If missing, no text is generated.

        Args:
            tokens_BT: int32 token ids [B, T], B sequences of T tokens.

        Returns:
            Floating logits of the token after each position, [B, T, V] for V token ids.
        """
        ...

    def cached_decoder(self) -> Decoder:
        """Returns functions that generate text with a cache. If missing, text is generated with `logits`.

        Returns:
            Functions of the parameters. `jgraph.functional` reads them.
        """
        ...


@dataclass(frozen=True)
class ModelHooks:
    """The optional members of the class `Model` that a model class has, checked, and a default for each other member."""

    tensor_rules: Callable[[ModelSettings | None], Mapping[str, Split | None]] = lambda config: {}
    pipeline_model: Callable[[ModelSettings | None, int], PipelineModel] | None = None
    splits_sequences: bool = False
    hugging_face: HuggingFace | None = None


def model_hooks(module: str) -> ModelHooks:
    """Imports a model class and resolves its hooks."""
    found = present(ModelHooks, find_model(module), module, tensor_rules=Mapping, pipeline_model=PipelineModel)
    hooks = ModelHooks(**found)
    if not isinstance(hooks.hugging_face, HuggingFace | None):
        must = f"must have the attribute hugging_face, a HuggingFace (it is a {type(hooks.hugging_face).__name__})"
        raise ConfigError(f"`module` is {module}: {must}", field="module")
    check_types(hooks, prefix=f"{module}.")
    return hooks
