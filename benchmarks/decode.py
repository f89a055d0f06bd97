"""Greedy text, one prompt of 128 tokens and 256 new ones: jgraph against PyTorch and transformers, bfloat16.

    python -m benchmarks run decode

`torch loop` is the same model in plain PyTorch, a static cache and torch.compile(mode="reduce-overhead"); `transformers` is
its own generate, with its static cache and compilation, of a Llama of the same sizes; `tuned` adds Inductor's search for tiles.
The whole call is timed, prompt included. The floor reads every matrix once a token, as fast as the GPU copies.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jgraph
from benchmarks.peers.protocol import answer, read_request, take_turns
from benchmarks.programs.step import first_devices
from benchmarks.rows import Row, gpt_config_from, named, ratio, spread
from benchmarks.runner import Benchmark, Options, Work
from benchmarks.tables import COLUMNS, Section, number
from benchmarks.turns import Candidate
from benchmarks.works import TINY
from jgraph.device import find
from jgraph.train.presets import preset
from jgraph_models import decoding
from jgraph_models.gpt import GPT, GPTConfig


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(Options):
    """Chooses what is run."""

    models: tuple[str, ...] = ("llama-1b3", "gpt-1b3")
    """gpt-1b3 is the preset; llama-1b3 has SwiGLU of about as many parameters, and transformers takes part."""
    variants: tuple[str, ...] = ("",)
    """Of ours: as it comes, `xla` with XLA's products."""
    peers: tuple[str, ...] = ("loop", "transformers")
    """PyTorch's, each also with `tuned` after it."""
    prompt_tokens: int = 128
    """Tokens of the prompt."""
    new_tokens: int = 256
    """Tokens drawn."""


def works(options: DecodeOptions) -> Iterator[Work]:
    lengths = {"prompt": options.prompt_tokens, "new": options.new_tokens}
    if options.sizes == "tiny":
        lengths = {"prompt": 8, "new": 8}
    for name in options.models:
        size = lengths | {"model": asdict(model_of(name, options.sizes))}
        peers = [peer for peer in options.peers if name.startswith("llama") or not peer.startswith("transformers")]
        gpus = int(options.sizes == "full")
        candidates = [
            Candidate({"system": system, "variant": variant}, module, size | {"variant": variant}, gpus=gpus)
            for system, module, variants in (
                ("jgraph", "benchmarks.decode", options.variants),
                ("torch", "benchmarks.peers.decode", peers),
            )
            for variant in variants
        ]
        yield Work(name, {"ranks": 1, "size": size}, [candidates])


def model_of(name: str, sizes: str) -> GPTConfig:
    config = TINY if sizes == "tiny" else preset("gpt-1b3").model
    # Of three matrices instead of two, two thirds as wide, rounded up to a multiple of 128.
    swiglu = {"mlp": "swiglu", "d_ff": -(-config.d_ff * 2 // 3 // 128) * 128}
    return replace(config, **swiglu) if name.startswith("llama") else config


def weight_bytes(size: Row) -> int:
    """Returns the bytes of the matrices that every token reads, each once."""
    config = gpt_config_from(size["model"])
    products = config.flops(1, 1) / 6 - config.num_layers * config.num_heads * config.head_size
    return int(products) * jnp.dtype(config.compute_dtype).itemsize


def time_ours(request: Row) -> None:
    """Answers with the time of a token; runs in a process of its own."""
    config = gpt_config_from(request["model"])
    if request["variant"] == "xla":
        decoding.fits = lambda *_: False
    model = jgraph.functional(lambda: GPT(config, rngs=nnx.Rngs(0)))
    dtype = jnp.dtype(config.compute_dtype)
    params = jax.jit(lambda: jax.tree.map(lambda leaf: leaf.astype(dtype), model.init()[0]))()
    prompt = np.random.default_rng(0).integers(0, config.vocab_size, request["prompt"])

    def run() -> None:
        jgraph.generate(model, params, [prompt], max_tokens=request["new"], temperature=0)

    run()
    answer(device=first_devices(1)[0].device_kind, moved_bytes=weight_bytes(request))
    take_turns(lambda timer: per_token(timer.back_to_back(run, lambda: None), request))


def per_token(timed: Row, request: Row) -> Row:
    return timed | {"ms": timed["ms"] / request["new"]}


def section(name: str, result: Row) -> Section:
    rows, size = result["rows"], result["size"]
    ours = rows[0] if rows else {}

    def of_floor(row: Row) -> str:
        device = find(row.get("device", ""))
        return f"{weight_bytes(size) / device.copy_bytes_per_second / row['ms'] * 1e3:.1%}" if device else ""

    return Section(
        f"{name}, {size['prompt']} tokens and {size['new']} more",
        {
            "variant": named,
            "ms a token": number("ms", ".3f"),
            "fastest, slowest": spread,
            "tokens/s": lambda row: f"{1e3 / row['ms']:.0f}",
            "of the bandwidth's floor": of_floor,
            "this / jgraph": lambda row: ratio(row, ours),
            **{name: COLUMNS[name] for name in ("W", "MHz")},
        },
    )


BENCHMARK = Benchmark("Greedy text, one prompt", __doc__, DecodeOptions, works, section)

if __name__ == "__main__":
    time_ours(read_request())
