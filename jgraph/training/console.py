"""What a user sees of a run: the configuration, a progress line, warnings, the summary."""

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from jgraph.data import Corpus
from jgraph.training.config import TrainConfig
from jgraph.training.model import is_built_in
from jgraph.training.presets import preset
from jgraph.training.rundir import flatten


@dataclass(frozen=True)
class Summary:
    """How a run stands when it ends.

    Attributes:
        outcome: `finished`; `already finished`, where nothing was left to do; or the signal that stopped it.
        steps: done in all, skipped ones included.
        skipped: of these, steps whose update was not applied because something was not finite.
        tokens: that those steps read.
        seconds: that they took, without compilation, evaluation and checkpoints, over all runs in the directory.
        train_loss: of the last step logged, nats per token; None if there was none.
        heldout_loss: of the last evaluation, nats per token; None if there was none.
        zlib_nats_per_token: what zlib needs for the same text; None where tokens are not bytes.
        run_dir: where everything is.
        sample: prompt and continuation; empty where none was asked for.
        stopped_by: the signal's name, e.g. `SIGTERM`; empty where the run is finished.
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
    """Writes to a console: one live line on a terminal, one plain line each time elsewhere. A context manager."""

    def __init__(self, console: Console, config: TrainConfig):
        self._console, self._config = console, config
        self._live = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=10),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._live.add_task("", total=config.steps, numbers="compiling")

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._live.stop()

    def line(self, text: str) -> None:
        """Writes a line above the progress line. What the console cannot show, a sample's U+FFFD say, becomes a `?`."""
        text = text.encode(self._console.encoding, errors="replace").decode(self._console.encoding)
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        self.line(f"warning: {text}")

    def progress(self, entry: dict[str, Any]) -> None:
        """Shows an entry of metrics.jsonl."""
        # An evaluation is a line that stays, on a terminal too.
        if self._live.disable or "eval_loss" in entry:
            self.line(f"step {entry['step']}/{self._config.steps}  {_numbers(entry)}")
        numbers = _numbers({key: value for key, value in entry.items() if key != "eval_loss"})
        self._live.update(self._task, completed=entry["step"], numbers=numbers)

    def begins(self, *, parameters: int, corpus: Corpus, devices: str) -> None:
        """Writes what the run is: of the configuration, what is not as usual; config.json has all of it."""
        config, rate = self._config, self._config.optimizer
        usual = preset(config.preset) if config.preset else TrainConfig(module=config.module, model=config.model)
        sizes = _differences(config.model, type(config.model)) if config.model is not None else ""
        run = _differences(config, lambda: replace(usual, model=config.model, distributed=config.distributed))
        slices = f" in {config.num_microbatches} microbatches" if config.num_microbatches > 1 else ""
        end = f"{rate.learning_rate * rate.final_learning_rate:.3g} at step {rate.decay_steps or config.steps}"
        self._rows(
            {
                "model": f"{config.module.rpartition(':')[2]} of {parameters:,} parameters{sizes and ': '}{sizes}",
                "data": f"{corpus.name}: {len(corpus.train):,} tokens to train on, {len(corpus.heldout):,} held out",
                "step": f"{config.batch_size} x {config.seq_len} tokens{slices} on {devices}",
                "rate": f"{rate.learning_rate:.3g} from step {rate.warmup_steps} on, by a cosine to {end}",
                "asked for": " ".join(filter(None, [config.preset and f"preset={config.preset}", run])) or "what is usual",
                "written to": f"{config.run_dir}, where config.json says the rest",
            }
        )

    def summary(self, summary: Summary) -> None:
        """Writes how the run ended."""
        seconds, zlib = summary.seconds, summary.zlib_nats_per_token
        rate = f", {summary.tokens / seconds:,.0f} tokens/s" if seconds else ""
        rows = {
            "outcome": f"{summary.outcome} at step {summary.steps}/{self._config.steps}",
            "loss": f"train {_number(summary.train_loss, '.4f')} nats/token",
            "held out": f"{_number(summary.heldout_loss, '.4f')} nats/token"
            + ("" if zlib is None else f"; zlib -9 needs {zlib:.4f} on the same text"),
            "tokens": f"{summary.tokens:,} in {seconds:.1f} s{rate}",
        }
        if summary.skipped:
            rows["skipped"] = f"{summary.skipped} updates, because the loss or a gradient was not finite"
        rows["written to"] = f"{summary.run_dir}: config.json, metrics.jsonl, checkpoints/"
        self._rows(rows)
        if any(summary.sample):
            prompt, continuation = summary.sample
            self.line(f"sample, from the held-out prompt {prompt!r}:\n{continuation}")
            module = "" if is_built_in(self._config.module) else f" --model.module {self._config.module}"
            self.line(f"ask it for more: python -m jgraph.sample {summary.run_dir}{module} --prompt 'The '")

    def _rows(self, rows: dict[str, str]) -> None:
        for label, text in rows.items():
            self.line(f"{label:11}{text}")


def _numbers(entry: dict[str, Any]) -> str:
    parts = [f"loss {_number(entry['loss'], '.4f')}"]
    if "eval_loss" in entry:
        parts.append(f"held-out loss {_number(entry['eval_loss'], '.4f')}")
    parts.append(f"{_number(entry['tokens_per_second'], ',.0f')} tokens/s")
    parts.append(f"{_number(entry['step_time_ms'], '.1f')} ms/step")
    if entry["mfu"] is not None:
        parts.append(f"MFU {entry['mfu']:.1%}")
    parts.append(f"{entry['peak_memory_bytes'] / 2**30:.2f} GiB")
    if entry["skipped"]:
        parts.append(f"{entry['skipped']} skipped")
    return "  ".join(parts)


def _differences(config: Any, usual: Callable[[], Any]) -> str:
    """Returns the fields of a dataclass that are not as usual, NAME=VALUE; all of them where there is nothing usual."""
    here, there = flatten(asdict(config)), {}
    with contextlib.suppress(TypeError):  # it has fields without a default
        there = flatten(asdict(usual()))
    differing = {name: value for name, value in here.items() if name not in there or there[name] != value}
    return " ".join(f"{name}={','.join(value) if isinstance(value, tuple) else value}" for name, value in differing.items())


def _number(value: float | None, form: str) -> str:
    return "?" if value is None else format(value, form)
