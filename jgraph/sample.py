"""Continue texts with the model of a training run or of a Hugging Face folder.

    python -m jgraph.sample runs/first --prompt "The with statement"
    python -m jgraph.sample folder/ --prompt "Once" --prompt "Twice" --temperature 0
    git diff | python -m jgraph.sample folder/ --prompt - --max-tokens 40
    python -m jgraph.sample folder/ --chat --prompt "What is a monad?"

Prints each prompt and its continuation to stdout as tokens arrive, and the times of loading and compilation to stderr. Runs of
any parallel layout can be sampled, also while they train.
"""

import itertools
import sys
from pathlib import Path
from typing import Annotated

import tyro

from jgraph.cli import Count, Directory, Module, command, interruptible
from jgraph.errors import ConfigError, require
from jgraph.exits import end_with
from jgraph.interop.folder import check_exists

_Texts = tyro.conf.UseAppendAction[tuple[str, ...]]


def sample(
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN_OR_DIR")],
    /,
    *,
    prompts: Annotated[_Texts, tyro.conf.arg(name="prompt", metavar="TEXT")] = (),
    chat: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    system: Annotated[str, tyro.conf.arg(metavar="TEXT")] = "",
    max_tokens: int = 128,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: Annotated[_Texts, tyro.conf.arg(metavar="TEXT")] = (),
    seed: int = 0,
    window: Count = None,
    step: Count = None,
    module: Module = "",
    adapter: Directory = None,
) -> None:
    """Prints the prompts and their continuations to stdout, in the order of the prompts, with an empty line between two texts.

    With `chat`, prints only the answers.

    The first text is printed as its tokens arrive, each other text when all texts are complete. The times of
    loading and compilation go to stderr.

    Args:
        run: A run directory of `python -m jgraph.train`, or a Hugging Face folder.
        prompts: Text to continue; - reads standard input. Repeat the flag for several texts. At least one is required.
        chat: Render each prompt as a message of the user with the chat template, and print the answer of the assistant.
        system: With `chat`: content of a message of the system before each prompt.
        max_tokens: Maximum number of new tokens of each text.
        temperature: Divides the logits before the softmax; 0 takes the likeliest token.
        top_k: Draw from the TOP_K likeliest tokens; 0 for all.
        top_p: Draw from the likeliest tokens with this total probability; 1 for all.
        stop: Text that ends a continuation. Repeat the flag for several.
        seed: Random seed of the sampling.
        window: Maximum number of tokens that a token attends to; by default the longest sequence in training, without a limit
            if that is unknown. A prompt must not be longer.
        step: Step of the checkpoint to load; by default the newest. Only for runs.
        module: Model class of the run, as `package.module:Class`. Required for a class outside `jgraph_models`, because loading
            imports it and so runs its code. Not for a folder.
        adapter: PEFT folder with a LoRA adapter for the model.

    Raises:
        JgraphError: If there is no prompt, the model cannot be loaded, it has no tokenizer, an option has a value that is not
            allowed, or JAX has no device.
    """
    if not prompts:
        raise ConfigError("`prompts` is missing: pass a text, or - to read standard input", field="prompts")
    require(chat or not system, "system", system, "empty without `chat`")
    check_exists(run, field="run")
    # Imported here, so that --help and errors in flags do not wait for jax.
    from absl import logging

    from jgraph.dispatch import check_devices
    from jgraph.train.loaded import load

    logging.set_verbosity(logging.FATAL)  # Orbax also logs the errors that it raises.
    check_devices()
    # Bytes that are not UTF-8 are kept as surrogates.
    stdin = sys.stdin.buffer.read().decode(errors="surrogateescape") if "-" in prompts else ""
    texts = [stdin if prompt == "-" else prompt for prompt in prompts]
    limit = {} if window is None else {"window": window}
    draw = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "key": seed}
    settings = {"max_tokens": max_tokens, "stop": stop, **draw, **limit}
    with interruptible("loading the model"):
        loaded = load(run, step, module=module, adapter=adapter)
        if chat:
            before = [{"role": "system", "content": system}] if system else []
            pieces = loaded.chat_stream([[*before, {"role": "user", "content": text}] for text in texts], **settings)
            texts = ["" for _ in texts]
        else:
            pieces = loaded.stream(texts, **settings)
    with interruptible("compiling the prompt and token programs"):
        first = list(itertools.islice(pieces, 1))
    # All texts grow at the same time. The first is printed as it grows, the others when it is complete.
    later = ["" for _ in texts]
    print(texts[0], end="", flush=True)
    for number, piece in itertools.chain(first, pieces):
        if number:
            later[number] += piece
        else:
            print(piece, end="", flush=True)
    for prompt, text in zip(texts[1:], later[1:], strict=True):
        print(f"\n\n{prompt}{text}", end="", flush=True)
    print("\n", end="", flush=True)


main = command("python -m jgraph.sample", __doc__, sample)

if __name__ == "__main__":
    end_with(main)
