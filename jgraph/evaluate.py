"""Evaluate the model of a training run or of a Hugging Face folder on held-out text.

    python -m jgraph.evaluate runs/first
    python -m jgraph.evaluate runs/first --data book.txt --json numbers.json
    python -m jgraph.evaluate folder/ --data tokens/ --fsdp 4

Prints the loss in nats per token, the perplexity, and bits per byte, which compares models with different tokenizers. By
default, a run is evaluated on the same batches as during training. Runs of any parallel layout can be evaluated, also while
they train.
"""

import dataclasses
import math
import sys
from json import dumps
from pathlib import Path
from typing import Annotated

import tyro

from jgraph.cli import Count, File, Module, command
from jgraph.errors import os_errors
from jgraph.interop.folder import check_exists


def evaluate(
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN_OR_DIR")],
    /,
    *,
    data: tuple[str, ...] = (),
    step: Count = None,
    module: Module = "",
    batch_size: Count = None,
    seq_len: Count = None,
    eval_batches: Count = None,
    dp: Count = None,
    fsdp: Count = None,
    tp: Count = None,
    json: File = None,
) -> None:
    """Evaluates the model on held-out text. Prints five lines to stdout, and writes the results to a file if `json` is given.

    The lines have the model, the text, the loss in nats per token, the perplexity and the bits per byte, in this order. The
    bits per byte are `unknown` if the tokens cannot be decoded to text. Does not change the run.

    Args:
        run: A run directory of `python -m jgraph.train`, or a Hugging Face folder.
        data: Data to evaluate on, with the values of --data of `python -m jgraph.train`: files, directories and globs of text,
            JSON Lines or Parquet, names of corpora such as python-docs, hf:owner/name, or directories of token files. Only the
            held-out part is used. By default the run's data; required for a folder.
        step: Step of the checkpoint to load; by default the newest. Only for runs.
        module: Model class of the run, as `package.module:Class`. Required for a class outside `jgraph_models`, because loading
            imports it and so runs its code. Not for a folder.
        batch_size: Sequences per batch; by default the run's, or 8 for a folder.
        seq_len: Predicted tokens per sequence; by default the run's. For a folder, the smaller of 1024 and its
            max_position_embeddings.
        eval_batches: Maximum number of batches, spread evenly over the text; by default the run's, or 16 for a folder.
        dp: Number of data-parallel replicas, 1 by default. Each evaluates a part of the batch.
        fsdp: Number of devices that the parameters are sharded over, 1 by default. Each evaluates a part of the batch.
        tp: Number of devices that each matrix is split over, 1 by default. The command uses dp * fsdp * tp devices.
        json: Also write the results to this file, as a JSON object with the keys source, data, fingerprint, batches,
            batch_size, seq_len, devices, tokens, bytes, loss, perplexity and bits_per_byte. Infinities, NaN and unknown values
            become null.

    Raises:
        JgraphError: If the model or the data cannot be used, an option has a value that is not allowed, there are too few
            devices, or the file cannot be written.
    """
    check_exists(run, field="run")
    # Imported here, so that --help and errors in flags do not wait for jax.
    from absl import logging

    from jgraph.dispatch import check_devices
    from jgraph.train import evaluation

    logging.set_verbosity(logging.FATAL)  # Orbax also logs the errors that it raises.
    check_devices()
    sizes = {"batch_size": batch_size, "seq_len": seq_len, "eval_batches": eval_batches, "dp": dp, "fsdp": fsdp, "tp": tp}
    options = {name: value for name, value in ({"data": data or None} | sizes).items() if value is not None}
    found = evaluation.evaluate(run, step, module=module, **options)
    if json is not None:
        fields = dataclasses.asdict(found) | {"perplexity": found.perplexity, "bits_per_byte": found.bits_per_byte}
        # JSON has no infinity or NaN.
        valid = {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in fields.items()}
        with os_errors("json", json):
            json.write_text(dumps(valid, indent=2) + "\n")
    bits = "unknown: the tokens cannot be decoded" if found.bits_per_byte is None else f"{found.bits_per_byte:.4f}"
    print(f"model      {found.source}")
    print(f"held out   {found.batches} x {found.batch_size} x {found.seq_len} tokens of {found.data}")
    print(f"loss       {found.loss:.4f} nats/token")
    print(f"perplexity {found.perplexity:.4g}")
    print(f"bits/byte  {bits}")


main = command("python -m jgraph.evaluate", __doc__, evaluate)

if __name__ == "__main__":
    sys.exit(main())
