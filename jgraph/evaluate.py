"""Evaluate the model of a training run or of a Hugging Face folder on held-out text, or on tasks of lm-eval.

    python -m jgraph.evaluate runs/first
    python -m jgraph.evaluate runs/first --data book.txt --json numbers.json
    python -m jgraph.evaluate folder/ --data tokens/ --fsdp 4
    python -m jgraph.evaluate folder/ --tasks arc_easy my_task.yaml --limit 100

Prints the loss in nats per token, the perplexity, and bits per byte, which compares models with different tokenizers. By
default, a run is evaluated on the same batches as during training. Runs of any parallel layout can be evaluated, also while
they train.

With --tasks, prints a table of the metrics of tasks of the Language Model Evaluation Harness instead.
"""

import dataclasses
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import tyro

from jgraph.cli import Count, Directory, File, Module, Name, command, interruptible
from jgraph.errors import os_errors, require
from jgraph.exits import end_with
from jgraph.interop.folder import check_exists


def evaluate(
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN_OR_DIR")],
    /,
    *,
    data: tuple[str, ...] = (),
    data_format: Annotated[Name, tyro.conf.arg(name="data.format", metavar="{text,chat}")] = None,
    step: Count = None,
    module: Module = "",
    adapter: Directory = None,
    tasks: tuple[str, ...] = (),
    num_fewshot: Count = None,
    limit: Count = None,
    batch_size: Count = None,
    seq_len: Count = None,
    eval_batches: Count = None,
    dp: Count = None,
    fsdp: Count = None,
    tp: Count = None,
    json: File = None,
) -> None:
    """Evaluates the model on held-out text or on tasks. Prints to stdout, and to a file if `json` is given.

    For text, five lines have the model, the text, the loss in nats per token, the perplexity and the bits per byte, in this
    order. The bits per byte are `unknown` if the tokens cannot be decoded to text. For tasks, a table has the metrics of each
    task. Does not change the run.

    Args:
        run: A run directory of `python -m jgraph.train`, or a Hugging Face folder.
        data: Data to evaluate on, with the values of --data of `python -m jgraph.train`: files, directories and globs of text,
            JSON Lines or Parquet, names of corpora such as python-docs, hf:owner/name, or directories of token files. Only the
            held-out part is used. By default the run's data; required for a folder.
        data_format: `chat` for chat records: only the tokens of the assistant count. By default as the first record of `data`
            says, else the run's.
        step: Step of the checkpoint to load; by default the newest. Only for runs.
        module: Model class of the run, as `package.module:Class`. Required for a class outside `jgraph_models`, because loading
            imports it and so runs its code. Not for a folder.
        adapter: PEFT folder with a LoRA adapter for the model.
        tasks: Tasks to score instead of text: names of tasks, groups and tags of lm-eval, YAML files of tasks, or folders with
            such files. Needs the extra lm-eval. Uses one device. A YAML file can name Python functions, which are run.
        num_fewshot: Number of examples before each question of a task; by default the task's. Only with --tasks.
        limit: Number of documents of each task; by default all. Only with --tasks.
        batch_size: Sequences per batch; by default the run's, or 8 for a folder or with --tasks.
        seq_len: Predicted tokens per sequence; by default the run's. For a folder, the smaller of 1024 and its
            max_position_embeddings. With --tasks, the maximum length of a request, by default the longest sequence in training.
        eval_batches: Maximum number of batches, spread evenly over the text; by default the run's, or 16 for a folder.
        dp: Number of data-parallel replicas, 1 by default. Each evaluates a part of the batch.
        fsdp: Number of devices that the parameters are sharded over, 1 by default. Each evaluates a part of the batch.
        tp: Number of devices that each matrix is split over, 1 by default. The command uses dp * fsdp * tp devices.
        json: Also write the results to this file, as a JSON object with the keys source, data, fingerprint, batches,
            batch_size, seq_len, devices, tokens, bytes, loss, perplexity and bits_per_byte. With --tasks, an
            object with the keys source, num_fewshot, limit and results, a list of objects with the keys task, metric, value and
            stderr. Infinities, NaN and unknown values become null.

    Raises:
        JgraphError: If the model or the data cannot be used, an option has a value that is not allowed, there are too few
            devices, or the file cannot be written.
    """
    of_text = {"data": data or None, "data_format": data_format, "eval_batches": eval_batches, "dp": dp, "fsdp": fsdp, "tp": tp}
    of_tasks = {"num_fewshot": num_fewshot, "limit": limit}
    for name, value in (of_text if tasks else of_tasks).items():
        shown = " ".join(value) if isinstance(value, tuple) else value
        require(value is None, name, shown, f"{'left out' if tasks else 'used'} with `tasks`")
    check_exists(run, field="run")
    # Imported here, so that --help and errors in flags do not wait for jax.
    from absl import logging

    from jgraph.dispatch import check_devices
    from jgraph.train.metrics import finite

    logging.set_verbosity(logging.FATAL)  # Orbax also logs the errors that it raises.
    check_devices()
    sizes = {"batch_size": batch_size, "seq_len": seq_len}
    of_model = {"module": module, "adapter": adapter}
    if tasks:
        fields = of_tasks | _evaluate_tasks(run, step, of_model, tasks, _given(of_tasks | sizes))
    else:
        fields = _evaluate_text(run, step, of_model, _given(of_text | sizes))
    if json is not None:
        with os_errors("json", json):
            json.write_text(dumps(finite(fields), indent=2) + "\n")


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def _evaluate_text(run: Path, step: int | None, of_model: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    from jgraph.train import evaluation

    with interruptible("evaluating the model"):
        found = evaluation.evaluate(run, step, **of_model, **options)
    bits = "unknown: the tokens cannot be decoded" if found.bits_per_byte is None else f"{found.bits_per_byte:.4f}"
    print(f"model      {found.source}")
    print(f"held out   {found.batches} x {found.batch_size} x {found.seq_len} tokens of {found.data}")
    print(f"loss       {found.loss:.4f} nats/token")
    print(f"perplexity {found.perplexity:.4g}")
    print(f"bits/byte  {bits}")
    return dataclasses.asdict(found) | {"perplexity": found.perplexity, "bits_per_byte": found.bits_per_byte}


def _evaluate_tasks(
    run: Path, step: int | None, of_model: dict[str, Any], tasks: tuple[str, ...], options: dict[str, Any]
) -> dict[str, Any]:
    from jgraph.train.harness import score_tasks
    from jgraph.train.loaded import load
    from jgraph.train.metrics import finite

    with interruptible("loading the model"):
        loaded = load(run, step, **of_model)
    found = score_tasks(loaded, tasks, **options)
    rows = [("task", "metric", "value", "stderr")]
    rows += [(one.task, one.metric, _shown(one.value), _shown(one.stderr)) for one in found]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(f"model  {loaded.source}")
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    return {"source": loaded.source, "results": [finite(one._asdict()) for one in found]}


main = command("python -m jgraph.evaluate", __doc__, evaluate)

if __name__ == "__main__":
    end_with(main)
