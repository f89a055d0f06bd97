"""Export the model of a run as a Hugging Face folder, which transformers loads.

    python -m jgraph.export runs/first --to folder/
    python -m jgraph.export runs/first --to folder/ --step 500 --dtype float32
    python -m jgraph.export runs/lora --to adapter/ --weights adapter

Writes config.json, model.safetensors (several files from 5 GB on) and, if the run has one, the files of its tokenizer. With
`--weights adapter`, writes the adapters of a LoRA run alone, as a folder that PEFT loads. Runs of any parallel layout can be
exported, also while they train.
"""

import contextlib
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from jgraph.cli import Count, Module, command, phase
from jgraph.errors import os_errors, require
from jgraph.exits import end_with


def export(
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")],
    /,
    *,
    to: Path,
    step: Count = None,
    module: Module = "",
    dtype: Literal["bfloat16", "float32"] | None = None,
    weights: Literal["merged", "adapter"] = "merged",
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
        dtype: Dtype of the tensors. By default that of the folder that the run began from, else that of the run's parameters.
            An adapter always has float32.
        weights: For a LoRA run, `merged` writes the model with the adapters added to its weights. `adapter` writes
            adapter_config.json and adapter_model.safetensors, the format of the library PEFT.

    Raises:
        JgraphError: If the run or its checkpoint is missing or damaged, its model class has no Hugging Face format or may not
            be imported, `weights` is adapter for a run without LoRA, or the folder is not empty or cannot be created.
        OSError: If a file cannot be written.
    """
    # Imported here, so that --help and errors in flags do not wait for jax.
    from absl import logging

    from jgraph.adapters import AdaptedModel
    from jgraph.data._texts import check_empty
    from jgraph.data.tokenizer import tokenizer_files
    from jgraph.interop.adapter import write_adapter
    from jgraph.interop.write import write
    from jgraph.train.initial import copied_folder, names_of
    from jgraph.train.saved import SavedRun

    logging.set_verbosity(logging.FATAL)  # Orbax also logs the errors that it raises.
    check_empty(to, field="to")
    with contextlib.closing(SavedRun(run, step, module=module)) as saved:
        require(weights == "merged" or saved.config.lora.rank > 0, "weights", weights, "merged for a run without LoRA")
        names = names_of(saved.config.module, field="to")
        model = saved.config.model
        source = copied_folder(saved.dir)
        config = names.config(model, source.config if source else {"max_position_embeddings": saved.config.input.seq_len})
        copied = {name: saved.dir.origin / name for name in tokenizer_files(saved.dir.origin)}
        chosen = dtype or (source.dtype if source else saved.config.dtypes.main_params_dtype)
        parts = names.parts(model)
        lora = saved.config.lora
        with phase("writing the tensors"), os_errors("to", to):
            if weights == "adapter":
                assert isinstance(saved.model, AdaptedModel)
                base = saved.config.initial.init_from
                choices: Any = {"rank": lora.rank, "alpha": lora.alpha, "base": base}
                files = write_adapter(to, parts, saved.model.adapters, saved.read, **choices)
            else:
                files = write(to, config, parts, saved.read_merged, dtype=chosen, beside=copied)
    print(f"step {saved.step} of {run} is in {to}: {', '.join(file.name for file in files)}")


main = command("python -m jgraph.export", __doc__, export)

if __name__ == "__main__":
    end_with(main)
