"""Export the model of a run as a Hugging Face folder, which transformers loads.

    python -m jgraph.export runs/first --to folder/
    python -m jgraph.export runs/first --to folder/ --step 500 --dtype float32

Writes config.json, model.safetensors (several files from 5 GB on) and, if the run has one, tokenizer.json. Runs of any parallel
layout can be exported, also while they train.
"""

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jgraph.cli import Count, Module, command
from jgraph.errors import os_errors


def export(
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")],
    /,
    *,
    to: Path,
    step: Count = None,
    module: Module = "",
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
) -> None:
    """Writes the model as a Hugging Face folder, and prints one line with the step and the files. Does not change the run.

    The folder gets config.json, the tensors as safetensors, and the tokenizer files of the run. It appears under its name when
    it is complete; if the export fails, no file is left behind.

    Args:
        run: A run directory of `python -m jgraph.train`.
        to: Folder to create, with its parents; it must be empty if it exists.
        step: Step of the checkpoint to export; by default the newest.
        module: Model class of the run, as `package.module:Class`. Required for a class outside `jgraph_models`, because loading
            imports it and so runs its code.
        dtype: Dtype of the tensors.

    Raises:
        JgraphError: If the run or its checkpoint is missing or damaged, its model class has no Hugging Face format or may not
            be imported, or the folder is not empty or cannot be created.
        OSError: If a file cannot be written.
    """
    # Imported here, so that --help and errors in flags do not wait for jax.
    from absl import logging

    from jgraph.interop.write import check_empty, write
    from jgraph.train.initial import copied_files, copied_folder, names_of
    from jgraph.train.saved import SavedRun

    logging.set_verbosity(logging.FATAL)  # Orbax also logs the errors that it raises.
    check_empty(to, field="to")
    with contextlib.closing(SavedRun(run, step, module=module)) as saved:
        names, model = names_of(saved.config.module, field="to"), saved.config.model
        source = copied_folder(saved.dir)
        config = names.config(model, source.config if source else {"max_position_embeddings": saved.config.input.seq_len})
        copied = copied_files(saved.dir)
        with os_errors("to", to):
            files = write(to, config, names.parts(model), saved.read, dtype=dtype, beside=copied)
    print(f"step {saved.step} of {run} is in {to}: {', '.join(file.name for file in files)}")


main = command("python -m jgraph.export", __doc__, export)

if __name__ == "__main__":
    sys.exit(main())
