"""Train Flax models on NVIDIA GPUs as one captured program per step."""

from jgraph.config import ModelConfig as ModelConfig
from jgraph.config import OptimizerConfig as OptimizerConfig
from jgraph.config import TrainConfig as TrainConfig
from jgraph.loss import cross_entropy as cross_entropy
from jgraph.presets import preset as preset
