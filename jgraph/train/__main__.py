"""Train a GPT, or a Flax model of your own, on one device or several. Resumes a run that was interrupted.

    python -m jgraph.train
    python -m jgraph.train --preset gpt-124m --data tokens/ --run-dir runs/first
    srun --ntasks-per-node 8 python -m jgraph.train --preset gpt-1b3 --dp 16

Presets: {presets}.
A preset sets every option, and a flag overrides one option. The defaults below are those of {preset}.

The run directory holds config.json, metrics.jsonl (one JSON object per logged step) and checkpoints/.

The same command resumes from the last checkpoint. To train for more steps, raise --steps and set --optimizer.extend.
A new run can start with the weights of another run (--continue-from) or of a Hugging Face folder (--init-from).
"""

import argparse
import dataclasses
import functools
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import tyro

from jgraph import cli
from jgraph.cli import FlagConsole
from jgraph.data._texts import FIELD, has_chats
from jgraph.errors import ConfigError
from jgraph.exits import end_with, leave_alone
from jgraph.train.config import FIELDS, OptimizerConfig, TrainConfig
from jgraph.train.model import settings_of
from jgraph.train.presets import PRESETS, Trained, preset

_PROG = "python -m jgraph.train"
# An error in these fields can be the consequence of requesting more devices than exist.
_LAYOUT_FIELDS = ("dp", "fsdp", "ep", "cp", "tp", "num_microbatches")
# Flags of other trainers, with the flag of this command.
ELSEWHERE = {
    other: here
    for here, others in {
        "--optimizer.name": "optimizer optim opt-type",
        "--optimizer.schedule": "lr-scheduler-type lr-schedule lr-decay-style",
        "--optimizer.learning-rate": "lr learning-rate max-lr peak-lr",
        "--optimizer.final-learning-rate": "min-lr",
        "--optimizer.warmup-steps": "warmup warmup-steps warmup-iters lr-warmup-iters",
        "--optimizer.weight-decay": "wd weight-decay",
        "--optimizer.clip-norm": "clip-grad grad-clip max-grad-norm clip-norm",
        "--optimizer.beta1": "beta1 adam-beta1",
        "--optimizer.beta2": "beta2 adam-beta2",
        "--steps": "max-steps num-steps train-steps train-iters max-iters iterations",
        "--steps, in optimizer steps": "epochs num-epochs num-train-epochs",
        "--batch-size, in sequences a step": "global-batch-size train-batch-size per-device-train-batch-size bs batch",
        "--num-microbatches": "gradient-accumulation-steps grad-accum accumulate-grad-batches micro-batch-size",
        "--seq-len": "seq-length sequence-length max-seq-len max-seq-length block-size context-length",
        "--precision fp8": "fp8",
        "--precision bf16": "bf16",
        "--run-dir": "output-dir out-dir save-dir",
        "--data": "dataset data-path train-data",
        "--eval-every": "eval-interval eval-steps",
        "--checkpoint-every": "save-interval save-steps save-every",
        "--log-every": "log-interval logging-steps",
        "--tp": "tensor-parallel-size tensor-model-parallel-size tensor-parallelism",
        "--cp": "context-parallel-size context-parallelism cp-size",
        "--pp": "pipeline-parallel-size pipeline-model-parallel-size",
        "--dp": "data-parallel-size",
        "--remat layer": "gradient-checkpointing activation-checkpointing recompute",
        "--init-from": "model-name-or-path load pretrained",
        "--model.num-layers": "num-layers n-layer",
        "--model.d-model": "d-model hidden-size n-embd",
        "--model.num-heads": "num-heads num-attention-heads n-head",
    }.items()
    for other in map("--".__add__, others.split())
}


def main(argv: Sequence[str] | None = None, prog: str = _PROG) -> int:
    """Runs the command `python -m jgraph.train`: parses the flags, trains, and prints progress to stdout and errors to stderr.

    Args:
        argv: The arguments without the name of the program; None for those of the process.
        prog: The command as the user starts it, for the usage line and errors.

    Returns:
        The exit code: 0 if the run is finished or the help was printed; 1 if the loss or a gradient is not finite; 2 for
        invalid input, printed as one line to stderr; 130 after Ctrl-C and 143 after SIGTERM, when the run has been saved; 130
        after a second Ctrl-C, at once; 141 if the reader of stdout has closed it. The process ends inside this call with 75 if
        the devices do not finish a program within `hang_seconds` or another process of the run is gone, and with 130 or 143 if
        a signal arrives while the step is compiled.
    """
    return cli.run(prog, functools.partial(_run, prog=prog, began=time.monotonic()), argv, FIELDS)


def _run(args: list[str], prog: str, began: float) -> int:
    try:
        config = parse(args, prog)
    except ConfigError as e:
        if e.field in _LAYOUT_FIELDS:
            _check_device_count(args)
        raise
    if config is None:
        return 0
    # Imported after the flags are checked, because importing jax takes seconds.
    import jax

    from jgraph.checkpoint.store import hide_tracebacks
    from jgraph.train._trainer import train

    hide_tracebacks()
    end = functools.partial(cli.end_at_once, prog, fields=FIELDS)
    try:
        summary = train(config, console=FlagConsole(FIELDS), end=end, began=began)
    except BaseException as e:
        if jax.distributed.is_initialized():
            leave_alone(cli.exit_code(e))
        raise
    # Exit with 128 + signal number, so that `train && next` stops.
    return 128 + signal.Signals[summary.stopped_by] if summary.stopped_by else 0


def _check_device_count(args: Sequence[str]) -> None:
    """Checks that the devices the flags ask for exist, if the batch or the experts cannot be divided between them.

    With too few devices, that error comes first. In a run of several processes, the devices of the others are not known.
    """
    from jgraph.dispatch import check_devices
    from jgraph.launchers import launched
    from jgraph.processes import devices_of_ranks

    layout = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("dp", "fsdp", "pp", "ep", "cp", "tp"):
        layout.add_argument(f"--{name}", type=lambda size: 1 if size == "auto" else int(size), default=1)
    layout.add_argument("--distributed.coordinator", dest="coordinator")
    parsed = layout.parse_known_args(args)[0]
    if parsed.coordinator or launched(os.environ):
        return
    check_devices()
    flags = " ".join(
        f"`{name}` {count}" for name in ("dp", "pp", "fsdp", "ep", "cp", "tp") if (count := getattr(parsed, name)) > 1
    )
    devices_of_ranks(max(parsed.dp * parsed.fsdp, parsed.ep) * parsed.pp * parsed.cp * parsed.tp, flags=flags)


def parse(args: Sequence[str], prog: str = _PROG) -> TrainConfig | None:
    """Parses the flags of a run. Returns None after `--help`. Trains nothing and writes no files.

    The defaults are those of `--preset`. `--continue-from` and `--init-from` set the model, and without a preset the dtype of
    its matmuls. With `--init-from` or `--lora.rank`, the learning rate is one for fine-tuning. Imports the model class.
    """
    # These flags determine the other flags and their defaults. tyro parses them again and reports errors.
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("preset", "model.module", "init-from", "continue-from", "run-dir", "lora.rank", "data.field"):
        first.add_argument(f"--{flag}", nargs="?", default="", const="", dest=flag.rpartition(".")[2].replace("-", "_"))
    first.add_argument("--data", nargs="*", default=[])
    chosen = first.parse_known_args(args)[0]
    trains: Trained = "given weights" if chosen.init_from else "from scratch"
    if chosen.rank not in ("", "0"):
        trains = "adapters"
    base = preset(chosen.preset or "cpu-tiny", trains=trains)
    if chosen.continue_from:
        from jgraph.train.initial import config_of_run

        source = config_of_run(chosen.continue_from, chosen.run_dir or base.output.run_dir, module=chosen.module)
        if not chosen.preset and source.preset in PRESETS:
            base = preset(source.preset, trains=trains)
        base = base.changed(module=source.module, model=source.model)
    module = chosen.module or base.module
    # The preset's own model is not imported: that would import jax, which delays the error for a wrong flag by seconds.
    settings = type(base.model) if module == base.module and base.model is not None else settings_of(module)
    model: Any = base.model if settings and isinstance(base.model, settings) else None
    if settings and model is None:
        try:
            model = settings()
        except TypeError:  # some settings have no default and must be given as flags
            model = tyro.MISSING
    if chosen.init_from and not chosen.continue_from and isinstance(model, settings or ()):
        from jgraph.train.initial import with_settings_of

        # A preset chooses the dtype of the matmuls. Without one, it is the dtype of the folder.
        compute_dtype = "model" if chosen.preset else "folder"
        run_dir = chosen.run_dir or base.output.run_dir
        model = with_settings_of(module, model, chosen.init_from, run_dir, compute_dtype=compute_dtype)
    if chosen.rank.isdecimal() and int(chosen.rank) and (chosen.init_from or chosen.continue_from):
        from jgraph.train.initial import dtype_of_source

        dtype = dtype_of_source(chosen.init_from, chosen.continue_from, chosen.run_dir or base.output.run_dir)
        base = base.changed(lora=dataclasses.replace(base.lora, rank=int(chosen.rank), base_dtype=dtype))
    if has_chats(chosen.data, chosen.field or FIELD):
        base = base.changed(data_format="chat")
    base = base.changed(optimizer=_without_given(base.optimizer, args))
    # The fields of the model's settings become flags, too.
    field = ("model", settings or tyro.conf.Suppress[None], dataclasses.field())
    flags = dataclasses.make_dataclass("Flags", [field], bases=(TrainConfig,), frozen=True, kw_only=True)
    default = flags(**_shallow(base) | {"module": module, "model": model})
    description = (__doc__ or "").format(presets=", ".join(PRESETS), preset=base.preset)
    found = cli.parse(flags, prog, description, args, elsewhere=ELSEWHERE, default=default)
    return found and TrainConfig(**_shallow(found))


def _without_given(optimizer: OptimizerConfig, args: Sequence[str]) -> OptimizerConfig:
    """Marks the numbers that flags set as set, so that they do not follow the optimizer or `steps`."""
    given = {arg.partition("=")[0].replace("_", "-") for arg in args}
    unset = {name: value for name, value in optimizer.unset.items() if cli.flag(f"optimizer.{name}") not in given}
    return dataclasses.replace(optimizer, unset=unset)


def _shallow(config: TrainConfig) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(TrainConfig)}


if __name__ == "__main__":
    end_with(main)
