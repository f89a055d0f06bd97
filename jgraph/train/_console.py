"""Terminal output of a run: the header, progress lines, warnings and the summary."""

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from jgraph import cli
from jgraph.data import Corpus
from jgraph.data._rows import describe
from jgraph.settings import differing
from jgraph.train.config import TrainConfig
from jgraph.train.model import is_built_in
from jgraph.train.presets import PRESETS


@dataclass(frozen=True)
class Summary:
    """The result of a run. Counts and times include the run before it was resumed."""

    # "finished", "already finished" (no step was needed) or "stopped by SIGTERM" (or another signal)
    outcome: str
    steps: int
    # steps without an update, because the loss or a gradient was not finite
    skipped: int
    tokens: int
    # without compilation, evaluation, checkpoints and profiled steps
    seconds: float
    # of the last logged step, in nats per token; None if it is not finite or there was none
    train_loss: float | None
    heldout_loss: float | None
    # size of the first 32 MiB of the text, compressed by zlib at level 9, to compare with the losses;
    # None if tokens are not bytes or the data has several sources
    zlib_nats_per_token: float | None
    run_dir: Path
    # a prompt and its continuation; empty if no sample was generated
    sample: tuple[str, str] = ("", "")
    # name of the signal, for example "SIGTERM"
    stopped_by: str = ""


class Reporter:
    """Prints the header, progress, warnings and summary of a run. A terminal has a live line inside the `with` block."""

    def __init__(self, console: Console, steps: int):
        self._console = console
        self._steps = steps
        self._live = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=10),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._live.add_task("", total=steps, numbers="first step")

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._live.stop()
        self._console.show_cursor()  # a phase hides it, and a run that hangs ends inside the phase

    def line(self, text: str) -> None:
        """Prints one or several lines as they are, without markup. Characters that the console cannot encode become `?`."""
        text = text.encode(self._console.encoding, errors="replace").decode(self._console.encoding)
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def phase(self, name: str, at_stop: Callable[[], str] | None = None) -> contextlib.AbstractContextManager[None]:
        """Shows a phase that takes seconds, as `cli.phase` does. Not inside the `with` block of the live line."""
        return cli.phase(name, self._console, at_stop=at_stop)

    def warn(self, text: str) -> None:
        self.line(f"warning: {text}")

    def progress(self, entry: dict[str, Any]) -> None:
        """Shows an entry of metrics.jsonl: in the live line, or in a line of its own."""
        # On a terminal, evaluations are printed too, because the next step overwrites the live line.
        if self._live.disable or "eval_loss" in entry:
            self.line(f"step {entry['step']}/{self._steps}  {_numbers(entry)}")
        numbers = _numbers({key: value for key, value in entry.items() if key != "eval_loss"})
        self._live.update(self._task, completed=entry["step"], numbers=numbers)

    def begins(self, config: TrainConfig, *, parameters: int, trained: int, corpus: Corpus, devices: str) -> None:
        """Prints the run header: model, data, batch, learning rate, and every setting that is not a default."""
        batch = config.input
        optimizer = config.optimizer
        sizes, changed = map(_settings, _changed_settings(config))
        count = f"{parameters:,} parameters" + (f", {trained:,} of them trained" if trained < parameters else "")
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
        """Prints the result of a run, its sample text, and the command that generates more text."""
        seconds = summary.seconds
        zlib = summary.zlib_nats_per_token
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
    sizes = {} if model is None else differing(asdict(model), defaults)
    unset = {f"optimizer.{name}" for name in config.optimizer.unset}
    changed = differing(config.to_dict(), base.to_dict())
    return sizes, {name: value for name, value in changed.items() if name not in unset}


def _settings(fields: dict[str, Any]) -> str:
    return " ".join(f"{name}={','.join(value) if isinstance(value, tuple) else value}" for name, value in fields.items())


def _number(value: float | None, form: str) -> str:
    return "?" if value is None else format(value, form)
