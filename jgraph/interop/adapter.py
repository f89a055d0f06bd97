"""Reads and writes LoRA adapters as folders of the library PEFT: adapter_config.json and adapter_model.safetensors.

PEFT stores two matrices for each linear layer: lora_A [rank, K] and lora_B [N, rank], the transposes of A and B of
`jgraph.lora`. A parameter that concatenates several tensors of a Hugging Face folder has an adapter for each tensor.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from jgraph.adapters import A, Adapter, B
from jgraph.data._texts import new_folder
from jgraph.errors import ConfigError, require
from jgraph.interop import fields
from jgraph.interop.folder import Folder
from jgraph.interop.names import Box, Part
from jgraph.interop.write import tensors_of, write_json, write_tensors

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
# Fields of adapter_config.json for features that are not supported. Must be false, null or empty.
_OFF = """alora_invocation_tokens alpha_pattern arrow_config fan_in_fan_out kasa_config layer_replication lora_bias
    modules_to_save rank_pattern target_parameters trainable_token_indices use_bdlora use_dora use_qalora"""
# Allowed values. The first is the default. Other initializations, such as PiSSA, change the base weights.
_MUST = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal")}


class AdapterFolder(Folder):
    """Reads a LoRA adapter from a PEFT folder. Writes nothing."""

    config_file = CONFIG_FILE

    def rank_and_alpha(self) -> tuple[int, float]:
        """Returns the rank of all adapters, and alpha: they are multiplied by alpha / rank.

        Raises ConfigError for features that are not supported: other methods than LoRA, DoRA, different ranks or scales of
        layers, trained biases, and other trained parameters than adapters.
        """
        with self._config_errors():
            for name, allowed in _MUST.items():
                require(self.config.get(name, allowed[0]) in allowed, name, self.config.get(name), f"{allowed[0]}".lower())
            for name in _OFF.split():
                require(not self.config.get(name), name, self.config.get(name), "left out, false, null or empty")
            rank = fields.integer(self.config, "r", 8)
            alpha = fields.number(self.config, "lora_alpha", 8)
            require(alpha > 0, "lora_alpha", alpha, "positive")
            # Rank-stabilized LoRA multiplies by alpha / sqrt(rank).
            return rank, alpha * math.sqrt(rank) if fields.boolean(self.config, "use_rslora", False) else alpha

    def targets(self, parts: Mapping[str, Sequence[Part]]) -> tuple[str, ...]:
        """Returns the names of the parameters with an adapter for one or more of their tensors, at least one."""
        of_tensor = {tensor: name for name, own in parts.items() for part in own for tensor in _tensors(part)}
        if unknown := [tensor for tensor in self._files if tensor not in of_tensor]:
            raise self.error(f"{WEIGHTS_FILE} has {unknown[0]}: must have LoRA matrices of the layers of the model only")
        found = {of_tensor[tensor] for tensor in self._files}
        if not found:
            raise self.error(f"{WEIGHTS_FILE} has no tensor")
        return tuple(name for name in parts if name in found)

    def check_adapters(self, parts: Mapping[str, Sequence[Part]]) -> None:
        """Checks that A and B of every adapter in the folder are complete and have the shapes of the model."""
        # `parts` are those of `adapter_parts`.
        present = {_stem(tensor) for tensor in self._files}
        for part in itertools.chain.from_iterable(parts.values()):
            if _stem(part.tensor) in present:
                self.check_tensor(part)

    def read(self, name: str, index: Box) -> np.ndarray:
        """Reads a slice of a matrix. A matrix that is not in the folder is zero."""
        if name in self._files:
            return super().read(name, index)
        return np.zeros([part.stop - part.start for part in index], np.float32)

    @functools.cached_property
    def _files(self) -> dict[str, Path]:
        return dict.fromkeys(self._names(self.path / WEIGHTS_FILE), self.path / WEIGHTS_FILE)


def adapter_parts(
    parts: Mapping[str, Sequence[Part]], adapters: Mapping[str, Adapter], rank: int
) -> dict[str, tuple[Part, ...]]:
    """Returns the tensors of adapters in a PEFT folder, by the names of A and B, such as `blocks/0/mlp/up/kernel_lora_a`."""
    found: dict[str, tuple[Part, ...]] = {}
    for name, adapter in adapters.items():
        starts = list(itertools.accumulate(adapter.widths, initial=0))
        of_a, of_b = [], []
        for part in parts[name]:
            *lead, _, column = part.start
            width, rows = part.shape[0], part.shape[-1]
            # An adapter has one part for each tensor, which is an [N, K] matrix.
            is_linear = part.order == "transposed" and len(part.shape) == 2
            if not is_linear or (column, column + width) not in itertools.pairwise(starts):
                must = "must select linear layers, and `tensor_rules` of the model must give parts to concatenated layers"
                raise ConfigError(f"`targets` selects {name}, which has no PEFT format: {must}", field="targets")
            a, b = _tensors(part)
            of_a.append(Part(a, (rank, rows), (*lead, 0, starts.index(column) * rank), "transposed"))
            of_b.append(Part(b, (width, rank), (*lead, 0, column), "transposed"))
        found |= {name + A: tuple(of_a), name + B: tuple(of_b)}
    return found


def write_adapter(
    to: Path,
    parts: Mapping[str, Sequence[Part]],
    adapters: Mapping[str, Adapter],
    parameter: Callable[[str], np.ndarray],
    *,
    rank: int,
    alpha: float,
    base: str,  # name of the base model, or ""
) -> list[Path]:
    """Writes adapters as a PEFT folder in float32, and returns the paths of its files."""
    own = adapter_parts(parts, adapters, rank)
    targets = [_layer(part) for name in adapters for part in parts[name]]
    # PEFT adds adapters to all layers with a name ending in a target.
    short = {layer.rpartition(".")[2] for layer in targets}
    others = {_layer(part) for name in parts if name not in adapters for part in parts[name]}
    is_short = not any(layer.rpartition(".")[2] in short for layer in others)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": sorted(short if is_short else targets),
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
    with new_folder(to) as folder:
        write_json(folder / CONFIG_FILE, config)
        write_tensors(folder / WEIGHTS_FILE, dict(tensors_of(own, parameter, "float32")))
    return sorted(to.absolute().iterdir())


def _layer(part: Part) -> str:
    return part.tensor.removesuffix(".weight")


def _tensors(part: Part) -> tuple[str, str]:
    layer = f"base_model.model.{_layer(part)}"
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


def _stem(tensor: str) -> str:
    return tensor.rpartition(".lora_")[0]
