"""The programs. Each function runs a training loop from the source of another project, with small sizes and synthetic data.

Data sets and TensorFlow are replaced by mocks. The model, the loss, the step and the loop come from the
project. Levanter is the exception: the loop around its train_step is here, because its own needs a tokenizer.
"""

# pyright: reportMissingImports=false

import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.others.watch import watched

STEPS = 3


class EndOfDataError(Exception):
    """Raised by synthetic data after `STEPS` batches, to leave a training loop."""


@dataclass(frozen=True)
class Program:
    """A program.

    Attributes:
        package: The package on PyPI that has the version of the program.
        source: Path of the program in the repository of its project, or in the package.
        revision: Commit of the repository. Empty for a program in the package.
        wrapper: Qualified name of the decorator of the step.
        steps: Names of the function that is jitted.
        run: Runs the program. Takes the folder with sources of all projects.
    """

    package: str
    source: str
    revision: str
    wrapper: str
    steps: tuple[str, ...]
    run: Callable[[Path], None]


def _mocked(*names: str) -> None:
    for name in names:
        sys.modules[name] = mock.MagicMock()


def _batches(make: Callable[[int], Any], count: int = STEPS) -> Iterator[Any]:
    yield from map(make, range(count))
    raise EndOfDataError


def _tokens(i: int, shape: tuple[int, ...], vocab: int) -> np.ndarray:
    return np.random.default_rng(i).integers(1, vocab, shape).astype(np.int32)


def _digits(i: int, size: int = 64, shape: tuple[int, ...] = (28, 28, 1)) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(i)
    return generator.random((size, *shape), np.float32), generator.integers(0, 10, size)


def _source(root: Path, folder: str) -> None:
    sys.path.insert(0, str(root / folder))


def _notebook(file: Path, edits: dict[str, str], names: dict[str, Any]) -> None:
    """Executes the code cells of a notebook. Skips cells that show an error on purpose."""
    for cell in json.loads(file.read_text())["cells"]:
        code = "".join(cell["source"])
        if cell["cell_type"] == "code" and not code.startswith("# This is an error!"):
            for old, new in edits.items():
                code = code.replace(old, new)
            exec(compile(code, str(file), "exec"), names)


def _flax_mnist(root: Path) -> None:
    _mocked("tensorflow", "tensorflow_datasets", "flax.metrics.tensorboard")
    _source(root, "flax/examples/mnist")
    train: Any = importlib.import_module("train")
    make = lambda i: dict(zip(("image", "label"), _digits(i), strict=True))  # noqa: E731
    train.get_datasets = lambda config: (mock.Mock(as_numpy_iterator=lambda: _batches(make)), None)
    config = importlib.import_module("configs.default").get_config()
    train.train_and_evaluate(config, tempfile.mkdtemp())


def _flax_lm1b(root: Path) -> None:
    importlib.import_module("flax.training.checkpoints")  # looks for TensorFlow
    _mocked("tensorflow", "clu", "input_pipeline")
    _source(root, "flax/examples/lm1b")
    train: Any = importlib.import_module("train")
    encoder = mock.MagicMock(vocab_size=lambda: 256)
    encoder.tokenize.return_value.numpy.return_value = np.ones(4, np.int32)
    data = _batches(lambda i: {"inputs": _tokens(i, (4, 64), 256)})
    train.input_pipeline.get_datasets.return_value = (data, None, None, encoder)
    train.evaluate, train.generate_prediction = lambda **_: {"loss": 0.0}, lambda **_: ""
    config = importlib.import_module("configs.default").get_config()
    small = {"num_layers": 2, "emb_dim": 64, "qkv_dim": 64, "mlp_dim": 128, "num_heads": 4, "max_eval_target_length": 64}
    config.update(
        small | {"max_target_length": 64, "restore_checkpoints": False, "save_checkpoints": False, "vocab_path": "/tmp/vocab"}
    )
    train.train_and_evaluate(config, tempfile.mkdtemp())


def _flax_gemma(root: Path) -> None:
    _mocked("clu", "input_pipeline", "tokenizer", "sampler", "grain")
    _source(root, "flax/examples/gemma")
    train: Any = importlib.import_module("train")
    encoder = mock.MagicMock(vocab_size=lambda: 256, pad_id=lambda: 0)

    def make(i: int) -> dict[str, np.ndarray]:
        tokens, positions = _tokens(i, (4, 64), 256), np.tile(np.arange(64, dtype=np.int32), (4, 1))
        ones = np.ones_like(tokens)
        return {"inputs": tokens, "targets": tokens, "inputs_position": positions, "inputs_segmentation": ones}

    train.input_pipeline.get_datasets.return_value = (_batches(make), None, encoder)
    config = importlib.import_module("configs.tiny").get_config()
    train.train_and_evaluate(config, tempfile.mkdtemp())


class _Loader(list[Any]):
    """A data loader of PyTorch with two batches."""

    def __init__(self, shape: tuple[int, ...], size: int):
        batches = [_digits(i, size, shape) for i in range(2)]
        super().__init__([mock.Mock(numpy=lambda array=array: array) for array in batch] for batch in batches)


def _torch(shape: tuple[int, ...]) -> None:
    _mocked("torch", "torchvision", "torchvision.transforms")
    torch: Any = sys.modules["torch"]
    torch.Tensor = _Loader  # Equinox asks whether arrays are tensors
    torch.utils.data.DataLoader = lambda dataset, batch_size, **_: _Loader(shape, batch_size)


def _equinox_mnist(root: Path) -> None:
    _torch((1, 28, 28))
    _notebook(root / "equinox/docs/examples/mnist.ipynb", {"STEPS = 300": f"STEPS = {STEPS}"}, {})


def _equinox_vit(root: Path) -> None:
    _torch((3, 32, 32))
    edits = {"num_steps = 100000": f"num_steps = {STEPS}", "num_layers = 6": "num_layers = 2", "= 512": "= 64"}
    edits |= {"batch_size = 64": "batch_size = 4", "len(test_dataset)": "0"}
    _notebook(root / "equinox/docs/examples/vision_transformer.ipynb", edits, {})


def _diffrax_ode(root: Path) -> None:
    _mocked("matplotlib", "matplotlib.pyplot")
    edits = {"= main()": f"= main(plot=False, steps_strategy=({STEPS},), length_strategy=(0.1,))"}
    _notebook(root / "diffrax/docs/examples/neural_ode.ipynb", edits, {})


def _numpyro_vae(root: Path) -> None:
    _mocked("matplotlib", "matplotlib.pyplot", "numpyro.examples.datasets")
    datasets: Any = sys.modules["numpyro.examples.datasets"]
    import jax.numpy as jnp

    images = jnp.asarray(_digits(0, 64 * 8, (28, 28))[0]).reshape(8, 64, 28, 28)
    datasets.load_dataset = lambda *args, **kwargs: (lambda: (8, jnp.arange(8)), lambda i, order: (images[order[i]], None))
    _source(root, "numpyro/examples")
    vae: Any = importlib.import_module("vae")
    args = mock.Mock(hidden_dim=64, z_dim=8, learning_rate=1e-3, batch_size=64, num_epochs=STEPS)
    vae.main(args)


def _haiku_mnist(root: Path) -> None:
    _mocked("tensorflow_datasets")
    _source(root, "haiku/examples")
    mnist: Any = importlib.import_module("mnist")
    mnist.load_dataset = lambda split, **_: _batches(lambda i: mnist.Batch(*_digits(i)), STEPS + 1)
    mnist.main(None)


def _maxtext(root: Path, *options: str) -> None:
    train: Any = importlib.import_module("maxtext.trainers.pre_train.train")
    base = Path(importlib.import_module("maxtext").__file__ or "").parent / "configs/base.yml"
    small = "base_num_decoder_layers=2 base_emb_dim=64 base_mlp_dim=128 base_num_query_heads=4 base_num_kv_heads=4 head_dim=16"
    data = f"dataset_type=synthetic per_device_batch_size=2 max_target_length=64 vocab_size=256 steps={STEPS}"
    place = f"run_name=x base_output_directory={tempfile.mkdtemp()} hardware=cpu skip_jax_distributed_system=true"
    off = "enable_checkpointing=false enable_goodput_recording=false log_config=false attention=dot_product"
    train.main(["train.py", str(base), *" ".join((small, data, place, off)).split(), *options])


def _maxtext_unrolled(root: Path) -> None:
    _maxtext(root, "scan_layers=false")


def _levanter(root: Path) -> None:
    import haliax
    import jax
    from levanter.models.llama import LlamaConfig
    from levanter.models.lm_model import LmExample
    from levanter.optim.config import AdamConfig
    from levanter.tracker import NoopConfig
    from levanter.trainer import Trainer, TrainerConfig

    model = LlamaConfig(max_seq_len=64, hidden_dim=64, intermediate_dim=128, num_layers=2, num_heads=4, num_kv_heads=4)
    place = {"require_accelerator": False, "log_dir": Path(tempfile.mkdtemp()), "id": "x"}
    config = TrainerConfig(tracker=NoopConfig(), train_batch_size=4, num_train_steps=STEPS, **place)
    config.initialize()
    batch, vocab = config.TrainBatch, haliax.Axis("vocab", 256)
    # The loss, the optimizer and the step of levanter.main.train_lm.
    loss = lambda model, example, *, key=None: model.compute_next_token_loss(example, key=key)  # noqa: E731
    with Trainer(config, AdamConfig().build(STEPS), loss, add_default_hooks=False) as trainer:
        state = trainer.initial_state(jax.random.key(1), model_init=lambda: model.build(vocab, key=jax.random.key(0)))
        for i in range(STEPS):
            tokens = haliax.named(_tokens(i, (batch.size, model.max_Pos.size), vocab.size), (batch, model.max_Pos))
            state = trainer.train_step(state, haliax.vmap(LmExample.causal, batch)(tokens)).state


def _easydel(root: Path) -> None:
    import easydel
    from datasets import Dataset

    # EasyDeL sets flags that jaxlib 0.10.2 does not have. Others stay, such as xla_gpu_enable_command_buffer=''.
    os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace("--xla_gpu_enable_shared_constants=true", "")

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = easydel.LlamaConfig(vocab_size=256, max_position_embeddings=64, num_key_value_heads=4, **sizes)
    import jax.numpy as jnp
    from flax import nnx

    model = easydel.LlamaForCausalLM(config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    tokens = _tokens(0, (4 * STEPS, 64), 256)
    data = Dataset.from_dict({"input_ids": tokens.tolist(), "attention_mask": np.ones_like(tokens).tolist()})
    arguments = easydel.TrainingArguments(
        save_directory=tempfile.mkdtemp(),
        total_batch_size=4,
        max_length=64,
        max_training_steps=STEPS,
        do_eval=False,
        do_last_save=False,
        use_wandb=False,
        progress_bar_type="json",
    )
    easydel.Trainer(arguments=arguments, model=model, dataset_train=data).train()


_FLAX, _EQUINOX, _DIFFRAX, _NUMPYRO, _HAIKU = "18f8f311", "9336d82", "5ea5fcb", "0b935d48", "f4d858a"

PROGRAMS = {
    "Flax mnist": Program("flax", "examples/mnist/train.py", _FLAX, "flax.nnx.jit", ("train_step",), _flax_mnist),
    "Flax lm1b": Program("flax", "examples/lm1b/train.py", _FLAX, "jax.jit", ("train_step",), _flax_lm1b),
    "Flax gemma": Program("flax", "examples/gemma/train.py", _FLAX, "jax.jit", ("jax_train_step",), _flax_gemma),
    "Equinox MNIST": Program(
        "equinox", "docs/examples/mnist.ipynb", _EQUINOX, "equinox.filter_jit", ("make_step",), _equinox_mnist
    ),
    "Equinox ViT": Program(
        "equinox", "docs/examples/vision_transformer.ipynb", _EQUINOX, "equinox.filter_jit", ("step_model",), _equinox_vit
    ),
    "Diffrax neural ODE": Program(
        "diffrax", "docs/examples/neural_ode.ipynb", _DIFFRAX, "equinox.filter_jit", ("make_step",), _diffrax_ode
    ),
    "NumPyro VAE": Program("numpyro", "examples/vae.py", _NUMPYRO, "jax.jit", ("epoch_train",), _numpyro_vae),
    "MaxText": Program("maxtext", "maxtext/trainers/pre_train/train.py", "", "jax.jit", ("train_step",), _maxtext),
    "MaxText, scan_layers=false": Program(
        "maxtext", "maxtext/trainers/pre_train/train.py", "", "jax.jit", ("train_step",), _maxtext_unrolled
    ),
    "Levanter (Marin)": Program(
        "marin-levanter", "levanter/trainer.py", "", "haliax.partitioning.named_jit", ("_train_step", "train_step"), _levanter
    ),
    "EasyDeL": Program("easydel", "easydel/trainers/trainer", "", "jax.jit", ("training_step",), _easydel),
    "Haiku MNIST": Program("dm-haiku", "examples/mnist.py", _HAIKU, "jax.jit", ("update",), _haiku_mnist),
}


def watch(name: str, root: Path, uses_jgraph: bool) -> dict[str, Any]:
    """Runs a program until its synthetic data end: explains its step, or replaces `jax.jit` by `jgraph.jit` for it.

    Returns the fields of `Seen`, and `failed`, the error that ended the program early.
    """
    program, failed = PROGRAMS[name], ""
    os.environ["EQX_ON_ERROR"] = "off"  # no Python callbacks, which cannot be compiled without a GPU
    with watched(program.wrapper, program.steps, uses_jgraph=uses_jgraph, explains=not uses_jgraph) as seen:
        try:
            program.run(root)
        except EndOfDataError:
            pass
        except Exception as e:
            traceback.print_exc()
            failed = f"{type(e).__name__}: {str(e).partition(chr(10))[0][:200]}"
    return {"reports": seen.reports, "sums": seen.sums, "failed": failed}
