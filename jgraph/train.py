"""Train a GPT, or a Flax model of your own, on one device or several; go on with a run that was interrupted.

    python -m jgraph.train
    python -m jgraph.train --preset gpt-124m --data tokens/ --run-dir runs/first
    srun --ntasks-per-node 8 python -m jgraph.train --preset gpt-1b3 --dp 16

The presets are {presets}; every flag overrides a field of the one chosen, and the defaults below are those of {preset}.
Everything is written to the run directory: config.json, metrics.jsonl (one JSON object a logged step) and checkpoints/.
The same command again goes on from the last checkpoint, and to more steps with --optimizer.extend. A new run may begin with the
weights of another one (--continue-from) or of a Hugging Face folder (--init-from).
"""

import argparse
import dataclasses
import functools
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any, get_type_hints

import tyro

from jgraph import cli
from jgraph.cli import FlagConsole, fields_of
from jgraph.training.config import TrainConfig
from jgraph.training.model import settings_of
from jgraph.training.presets import PRESETS, preset

_PROG = "jgraph.train"
_FIELDS = fields_of(TrainConfig)
# As other trainers call them.
ELSEWHERE = {
    other: here
    for here, others in {
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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns:
        Exit code, as `jgraph.cli.run`; 130 after Ctrl-C and 143 after SIGTERM, when all is saved; 130 after a second Ctrl-C, at
        once. Where the devices hang, the process ends here with 75 (`hang_seconds`); the same command goes on.
    """
    return cli.run(_PROG, _run, argv, _FIELDS)


def _run(args: list[str]) -> int:
    config = parse(args)
    if config is None:
        return 0
    # After the flags were checked: jax takes its time.
    from absl import logging

    from jgraph.training.trainer import train

    # Orbax logs tracebacks of errors that it also raises, and those are told in one line.
    logging.set_verbosity(logging.FATAL)
    summary = train(config, console=FlagConsole(_FIELDS), end=functools.partial(cli.end_at_once, _PROG, fields=_FIELDS))
    # As of a process that the signal ended, so that a shell does not go on as after a finished run.
    return 128 + signal.Signals[summary.stopped_by] if summary.stopped_by else 0


def parse(args: Sequence[str]) -> TrainConfig | None:
    """Returns the configuration that the arguments ask for, or None after --help, which is printed. Raises ConfigError."""
    # Which flags there are, and their defaults, depends on these. One without a value is left to tyro, as is all that is wrong.
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", nargs="?", default="", const="")
    first.add_argument("--model.module", nargs="?", dest="module")
    first.add_argument("--init-from", nargs="?", default="")
    first.add_argument("--continue-from", nargs="?", default="")
    first.add_argument("--run-dir", nargs="?", default="")
    chosen = first.parse_known_args(args)[0]
    base = preset(chosen.preset or "cpu-tiny")
    if chosen.continue_from:
        from jgraph.training.origin import config_of_run

        there = config_of_run(chosen.continue_from, chosen.run_dir or base.run_dir, module=chosen.module or "")
        if not chosen.preset and there.preset in PRESETS:
            base = preset(there.preset)
        base = dataclasses.replace(base, module=there.module, model=there.model)
    module = chosen.module or base.module
    # A preset's own model is not imported: that would take jax, and a wrong flag should be told at once.
    settings = type(base.model) if module == base.module and base.model is not None else settings_of(module)
    model: Any = base.model if settings and isinstance(base.model, settings) else None
    if settings and model is None:
        try:
            model = settings()
        except TypeError:  # it has settings without a default, which must be given
            model = tyro.MISSING
    if chosen.init_from and not chosen.continue_from and isinstance(model, settings or ()):
        from jgraph.training.origin import with_settings_of

        model = with_settings_of(module, model, chosen.init_from, chosen.run_dir or base.run_dir)
    # With the model's own settings, whose fields become flags too.
    kinds = get_type_hints(TrainConfig)
    names = [(name, cli.flag(name).removeprefix("--")) for name in ("module", "data_field", "data_shuffle", "data_documents")]
    fields = [(name, Annotated[kinds[name], tyro.conf.arg(name=shown)], dataclasses.field()) for name, shown in names]
    fields += [("model", settings or tyro.conf.Suppress[None], dataclasses.field())]
    flags = dataclasses.make_dataclass("Flags", fields, bases=(TrainConfig,), frozen=True, kw_only=True)
    default = flags(**_shallow(base) | {"module": module, "model": model})
    about = (__doc__ or "").format(presets=", ".join(PRESETS), preset=base.preset)
    found = cli.parse(flags, _PROG, about, args, elsewhere=ELSEWHERE, default=default)
    return found and TrainConfig(**_shallow(found))


def _shallow(config: TrainConfig) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(TrainConfig)}


if __name__ == "__main__":
    sys.exit(main())
