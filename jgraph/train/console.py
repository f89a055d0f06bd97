"""Terminal output of a run: the header, progress lines, warnings and the summary."""

import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from jgraph.data import Corpus
from jgraph.data._rows import describe
from jgraph.train.config import TrainConfig, flatten
from jgraph.train.model import is_built_in
from jgraph.train.presets import PRESETS


@dataclass(frozen=True)
class Summary:
    """The result of a run, as `train` returns it.

    Attributes:
        outcome: "finished", "already finished" (no step was needed) or "stopped by SIGTERM" (or another signal).
        steps: Number of finished steps of the run, including those before it was resumed and those without an update.
        skipped: Number of steps without an update, because the loss or a gradient was not finite.
        tokens: Number of training tokens of all steps.
        seconds: Time of all steps in seconds, also before the run was resumed. Excludes compilation, evaluation, checkpoints
            and profiled steps.
        train_loss: Loss of the last logged step in nats per token; None if no step was logged or this loss is not finite.
        heldout_loss: Loss of the last evaluation in nats per token; None if there was none or this loss is not finite.
        zlib_nats_per_token: Size of the first 32 MiB of the text of the data, compressed by zlib at level 9, in nats per byte,
            for comparison with the losses. None if tokens are not bytes or the data has several sources.
        run_dir: The run directory.
        sample: A prompt and its continuation, as texts. Both are empty if no sample was generated.
        stopped_by: Name of the signal that stopped the run, for example "SIGTERM". Empty if the run is finished.
    """

    outcome: str
    steps: int
    skipped: int
    tokens: int
    seconds: float
    train_loss: float | None
    heldout_loss: float | None
    zlib_nats_per_token: float | None
    run_dir: Path
    sample: tuple[str, str] = ("", "")
    stopped_by: str = ""


class Reporter:
    """Prints the header, progress, warnings and summary of a run to a console.

    A context manager: inside its `with` block, a live line at the bottom of a terminal shows the progress. On a console that is
    not a terminal, every logged step is printed as a line of its own.

    Args:
        console: The console to print to. A quiet console prints nothing.
        steps: Number of steps of the run.
    """

    def __init__(self, console: Console, steps: int):
        """Creates the live line. Nothing is printed."""
        self._console, self._steps = console, steps
        self._live = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=10),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._live.add_task("", total=steps, numbers="compiling")

    def __enter__(self) -> Self:
        """Shows the live line, if the console is a terminal. Returns the reporter itself."""
        self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Stops updating the live line and restores the terminal. Does not suppress an exception."""
        self._live.stop()

    def line(self, text: str) -> None:
        """Prints a text as it is, without markup, above the live line. Characters that the console cannot encode become `?`.

        Args:
            text: One or several lines, without a line break at the end.
        """
        text = text.encode(self._console.encoding, errors="replace").decode(self._console.encoding)
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Prints the line "warning: TEXT" above the live line.

        Args:
            text: The warning, one line.
        """
        self.line(f"warning: {text}")

    def progress(self, entry: dict[str, Any]) -> None:
        """Shows the step, losses, speed, peak memory and skipped updates of an entry of metrics.jsonl.

        On a terminal, updates the live line, and prints a line of its own if the entry has "eval_loss". Elsewhere, prints a
        line for every entry.

        Args:
            entry: The entry, with the keys "step", "loss" (nats per token), "tokens_per_second", "step_time_ms", "mfu"
                (fraction of the peak FLOP/s, or None), "peak_memory_bytes" and "skipped". After an evaluation also "eval_loss".
                Losses and speeds may be None and are then shown as `?`. For chat data also "trained_tokens". Other keys are
                ignored.
        """
        # On a terminal, evaluations are printed too, because the next step overwrites the live line.
        if self._live.disable or "eval_loss" in entry:
            self.line(f"step {entry['step']}/{self._steps}  {_numbers(entry)}")
        numbers = _numbers({key: value for key, value in entry.items() if key != "eval_loss"})
        self._live.update(self._task, completed=entry["step"], numbers=numbers)

    def begins(self, config: TrainConfig, *, parameters: int, trained: int, corpus: Corpus, devices: str) -> None:
        """Prints the run header: model, data, batch, learning rate, and every setting that differs from the preset.

        For a configuration without a preset, prints every setting that differs from the defaults.

        Args:
            config: The configuration of the run.
            parameters: Number of parameters of the model.
            trained: Number of them that are trained.
            corpus: The training data. Its name and numbers of tokens are printed.
            devices: Number and kind of the devices as a text, for example "8 NVIDIA H100 devices".
        """
        batch, optimizer = config.input, config.optimizer
        sizes, changed = map(_settings, _changed_settings(config))
        count = f"{parameters:,} parameters" + f", {trained:,} of them trained" * (trained < parameters)
        slices = f" in {batch.num_microbatches} microbatches" if batch.num_microbatches > 1 else ""
        warmup = f" after {optimizer.warmup_steps} warmup steps" if optimizer.warmup_steps else ""
        name = {"adamw": "AdamW"}.get(optimizer.name, optimizer.name)
        final = f"{optimizer.learning_rate * optimizer.final_learning_rate:.3g}"
        end = f"decay to {final} at step {optimizer.decay_steps or config.steps}"
        then = optimizer.schedule if optimizer.schedule in ("constant", "inverse-sqrt") else f"{optimizer.schedule} {end}"
        self._rows(
            {
                "model": f"{config.module.rpartition(':')[2]}, {count}{sizes and ', '}{sizes}",
                "data": f"{corpus.name}, {len(corpus.train):,} training tokens, {len(corpus.heldout):,} held-out tokens",
                **_chat_rows(corpus, batch.seq_len),
                "batch": f"{batch.batch_size} sequences of {batch.seq_len} tokens per step{slices}, on {devices}",
                "optimizer": f"{name}, learning rate {optimizer.learning_rate:.3g}{warmup}, then {then}",
                "settings": f"{f'preset {config.preset}' if config.preset else 'defaults'}, "
                + (f"changed: {changed}" if changed else "unchanged"),
                "output": f"{config.output.run_dir} (all settings are in its config.json)",
            }
        )

    def summary(self, summary: Summary, config: TrainConfig) -> None:
        """Prints the result of a run. If it has a sample text, also prints that text and the command that generates more text.

        Args:
            summary: The result of the run.
            config: The configuration of the run. The command names a model class outside `jgraph_models`, and asks a question
                after training on chat data.
        """
        seconds, zlib = summary.seconds, summary.zlib_nats_per_token
        rate = f", {summary.tokens / seconds:,.0f} tokens/s" if seconds else ""
        rows = {
            "status": f"{summary.outcome} at step {summary.steps}/{self._steps}",
            "loss": f"{_number(summary.train_loss, '.4f')} nats/token in the last logged step",
            "held out": f"{_number(summary.heldout_loss, '.4f')} nats/token"
            + ("" if zlib is None else f" (zlib -9 compresses the same text to {zlib:.4f} nats/token)"),
            "tokens": f"{summary.tokens:,} in {seconds:.1f} s of training steps{rate}",
        }
        if summary.skipped:
            rows["skipped"] = f"{summary.skipped} updates, because the loss or a gradient was not finite"
        rows["output"] = f"{summary.run_dir}: config.json, metrics.jsonl, checkpoints/"
        self._rows(rows)
        if any(summary.sample):
            prompt, continuation = summary.sample
            self.line(f"sample text for the held-out prompt {prompt!r}:\n{continuation}")
            flag = "" if is_built_in(config.module) else f" --model.module {config.module}"
            prompt = "--chat --prompt 'Hello'" if config.input.data_format == "chat" else "--prompt 'The '"
            self.line(f"to generate more: python -m jgraph.sample {summary.run_dir}{flag} {prompt}")

    def _rows(self, rows: dict[str, str]) -> None:
        for label, text in rows.items():
            self.line(f"{label:11}{text}")


def _chat_rows(corpus: Corpus, seq_len: int) -> dict[str, str]:
    """Returns a header row with the counts of chat data for each side; none for text."""
    sides = {"chat": corpus.sources, "held out": corpus.heldout_sources}
    return {name: describe(sources, seq_len) for name, sources in sides.items() if sources[0].packed is not None}


def _numbers(entry: dict[str, Any]) -> str:
    parts = [f"loss {_number(entry['loss'], '.4f')}"]
    if "eval_loss" in entry:
        parts.append(f"held-out loss {_number(entry['eval_loss'], '.4f')}")
    parts.append(f"{_number(entry['tokens_per_second'], ',.0f')} tokens/s")
    parts.append(f"{_number(entry['step_time_ms'], '.1f')} ms/step")
    if "trained_tokens" in entry:
        parts.append(f"{entry['trained_tokens']:,} trained tokens")
    if entry["mfu"] is not None:
        parts.append(f"MFU {entry['mfu']:.1%}")
    parts.append(f"{entry['peak_memory_bytes'] / 2**30:.2f} GiB peak")
    if entry["skipped"]:
        parts.append(f"{entry['skipped']} updates skipped")
    return "  ".join(parts)


def _changed_settings(config: TrainConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns settings that are not defaults, by dotted name: those of the model, and those outside `model` and `distributed`.

    The defaults are those of the preset, if there is one. Numbers that nobody set follow other settings, and are left out.
    """
    model: Any = config.model
    base = PRESETS[config.preset] if config.preset else TrainConfig(module=config.module)
    base = base.changed(model=model, distributed=config.distributed)
    defaults: dict[str, Any] = {}
    with contextlib.suppress(TypeError):  # some settings have no default
        defaults = {} if model is None else asdict(type(model)())
    sizes = {} if model is None else _differing(asdict(model), defaults)
    unset = {f"optimizer.{name}" for name in config.optimizer.unset}
    changed = _differing(config.to_dict(), base.to_dict())
    return sizes, {name: value for name, value in changed.items() if name not in unset}


def _differing(fields: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    flat, base = flatten(fields), flatten(base)
    return {name: value for name, value in flat.items() if name not in base or base[name] != value}


def _settings(fields: dict[str, Any]) -> str:
    return " ".join(f"{name}={','.join(value) if isinstance(value, tuple) else value}" for name, value in fields.items())


def _number(value: float | None, form: str) -> str:
    return "?" if value is None else format(value, form)
