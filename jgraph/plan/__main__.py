"""Plan a run: which layouts of a model fit on a number of GPUs, how fast each may be, and the command lines of the best.

    python -m jgraph.plan llama3-8b --gpu h100 --gpus 8
    python -m jgraph.plan path/to/Llama-3.1-70B --gpus 16 --finetune lora
    python -m jgraph.plan gpt-1b3 --gpus 4 --compile

Needs no GPU. The state is exact, other memory is predicted, and speeds are estimates.
"""

from typing import Annotated, Literal

import tyro

from jgraph.cli import Count, command, interruptible
from jgraph.errors import require
from jgraph.exits import end_with

_SOURCE = "PRESET|FOLDER"


def plan(
    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar=_SOURCE, help_behavior_hint="")],
    /,
    *,
    gpu: Literal["h100", "h200", "b200"] = "h100",
    gpus: int = 8,
    batch_size: Count = None,
    seq_len: Count = None,
    finetune: Literal["full", "lora"] = "full",
    precision: Literal["bf16", "fp8", "both"] = "bf16",
    compile: bool = False,
) -> None:
    """Print the layouts of a model that fit, fastest first, with memory per GPU and estimated tokens per second.

    Args:
        source: A preset such as llama3-8b, or a Hugging Face folder, of which only config.json is read.
        gpu: Model of GPU. This machine need not have it.
        gpus: Number of GPUs, at least 1. Eight share a node.
        batch_size: Sequences per step. By default those of the preset, but at least one for each GPU.
        seq_len: Tokens per sequence. By default those of the preset.
        finetune: full trains all weights, lora trains adapters of rank 16.
        precision: Dtype of the matmuls of the layers; both compares them.
        compile: Compile the fastest layouts that fit, each in a process, until three fit by the memory that XLA assigns, or six
            were compiled. Takes minutes. Needs the compiler of `python -m jgraph.aot install`.

    Raises:
        JgraphError: If there is no such preset or folder, an argument has a value that is not allowed, or the model refuses
            all layouts; or if `compile` is set and the compiler is not installed.
    """
    for name, size in (("gpus", gpus), ("batch_size", batch_size), ("seq_len", seq_len)):
        require(size is None or size >= 1, name, size, "at least 1")
    from jgraph.plan import _plan  # imported here, because importing jax is slow

    # The command line shows a positional argument by its metavar.
    _plan.check_source(source, _SOURCE)
    check: _plan.Check = "compiler" if compile else "arithmetic"
    with interruptible("planning and compiling" if compile else "planning"):
        found = _plan.plan(
            source,
            gpu=gpu,
            gpus=gpus,
            batch_size=batch_size,
            seq_len=seq_len,
            finetune=finetune,
            precision=precision,
            check=check,
        )
    print(found)


main = command("python -m jgraph.plan", __doc__, plan)

if __name__ == "__main__":
    end_with(main)
