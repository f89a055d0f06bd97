from ._version import __version__ as __version__
from .adapters import AdaptedModel as AdaptedModel, lora as lora
from .autodiff import split_backward as split_backward
from .callables import (
    Borrowed as Borrowed,
    Graphed as Graphed,
    GraphedCallables as GraphedCallables,
    RunResult as RunResult,
    fold_key as fold_key,
    make_graphed_callables as make_graphed_callables,
)
from .checkpoint import CanonicalLayout as CanonicalLayout, Checkpoints as Checkpoints
from .compare._compare import Comparison as Comparison, Measurement as Measurement, compare as compare
from .compare._difference import Difference as Difference
from .compare._program import Program as Program
from .errors import (
    CallableError as CallableError,
    CheckpointError as CheckpointError,
    CompilerOptionError as CompilerOptionError,
    ConfigError as ConfigError,
    DataError as DataError,
    DonationError as DonationError,
    JgraphError as JgraphError,
    NonFiniteError as NonFiniteError,
    OrderError as OrderError,
    OwnershipError as OwnershipError,
    ShapeError as ShapeError,
    SplitError as SplitError,
    TargetError as TargetError,
)
from .inference.generate import generate as generate, stream as stream
from .kernels.grouped import grouped_dot as grouped_dot
from .kernels.norm import rms_norm as rms_norm
from .layout import Packing as Packing
from .loss import cross_entropy as cross_entropy
from .mesh import BATCH_AXES as BATCH_AXES
from .modules import Decoder as Decoder, FunctionalModel as FunctionalModel, functional as functional
from .moe import MoEConfig as MoEConfig
from .moe._layer import MoE as MoE
from .pipeline import Pipelined as Pipelined, PipelineModel as PipelineModel, split_embedding as split_embedding
from .plan._plan import Option as Option, Plan as Plan, plan as plan
from .precision.config import FP8Config as FP8Config
from .precision.transform import FP8Function as FP8Function, fp8 as fp8
from .profile.record import record as record
from .schedule import Order as Order, Schedule as Schedule
from .scopes import scope as scope
from .step import elementwise as elementwise
from .step.compiled import CompiledStep as CompiledStep
from .step.matrices import sharded_matrices as sharded_matrices
from .step.packed import packed as packed
from .step.state import StepMetrics as StepMetrics, TrainState as TrainState
from .step.train_step import TrainStep as TrainStep, train_step as train_step
from .step.transform import Elementwise as Elementwise
from .strategies import (
    FullySharded as FullySharded,
    Loss as Loss,
    Replicated as Replicated,
    Split as Split,
    TensorParallel as TensorParallel,
)
from .train.harness import lm_eval_model as lm_eval_model
from .train.loaded import Loaded as Loaded, load as load
from .xla import CaptureReport as CaptureReport
from .xla.explain import Explanation as Explanation, Memory as Memory, explain as explain
from .xla.jit import Jitted as Jitted, jit as jit
from .xla.options import compiler_options as compiler_options
