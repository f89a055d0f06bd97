"""Greedy text generation in bfloat16, 256 tokens after a prompt of 128: jgraph against plain JAX, PyTorch and transformers.

    python -m benchmarks run decode

`jax scan` and `jax loop` are the layers of the model with XLA norms, library attention and a static cache: one jitted program
that scans over the tokens, or a Python loop around a jitted step. `torch loop` is the same model in plain PyTorch with a
static cache and `torch.compile(mode="reduce-overhead")`. `transformers` is `generate` with a static cache and compilation, on
a Llama of the same size. `tuned` adds the coordinate descent tuning of Inductor. The time includes the prompt. The lower
bound reads each weight matrix once per token at the copy bandwidth of the GPU.
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
from benchmarks.rows import Row, gpt_config_from, row_name, spread
from benchmarks.runner import Benchmark, Options, Work
from benchmarks.tables import Section, against_first, columns, number
from benchmarks.turns import Candidate
from benchmarks.works import TINY
from jgraph.device import find
from jgraph.train.presets import preset
from jgraph_models import decoding
from jgraph_models.gpt import GPT, GPTConfig


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(Options):
    """Flags of the benchmark."""

    models: tuple[str, ...] = ("llama-1b3", "gpt-1b3")
    """Models to time. llama-1b3 is gpt-1b3 with SwiGLU MLPs of about the same size. Only llama-1b3 runs transformers."""
    variants: tuple[str, ...] = ("",)
    """jgraph variants. Empty for the default; `xla` computes matrix-vector products with XLA instead of the Pallas kernel."""
    plain: tuple[str, ...] = ("scan", "loop")
    """Plain JAX variants. Pass the flag without values to skip plain JAX."""
    peers: tuple[str, ...] = ("loop", "transformers")
    """PyTorch variants. Append ` tuned` to a name to tune its kernels."""
    prompt_tokens: int = 128
    """Length of the prompt in tokens."""
    new_tokens: int = 256
    """Number of generated tokens."""


def works(options: DecodeOptions) -> Iterator[Work]:
    """Yields one work per model."""
    lengths = {"prompt": options.prompt_tokens, "new": options.new_tokens}
    if options.sizes == "tiny":
        lengths = {"prompt": 8, "new": 8}
    for name in options.models:
        size = lengths | {"model": asdict(model_config(name, options.sizes))}
        peers = [peer for peer in options.peers if name.startswith("llama") or not peer.startswith("transformers")]
        gpus = int(options.sizes == "full")
        candidates = [
            Candidate({"system": system, "variant": variant}, module, size | {"variant": variant}, gpus=gpus)
            for system, module, variants in (
                ("jgraph", "benchmarks.decode", options.variants),
                ("jax", "benchmarks.peers.plain_jax_decode", options.plain),
                ("torch", "benchmarks.peers.decode", peers),
            )
            for variant in variants
        ]
        yield Work(name, {"ranks": 1, "size": size}, [candidates])


def model_config(name: str, sizes: str) -> GPTConfig:
    """Returns the config of gpt-1b3 or llama-1b3."""
    config = TINY if sizes == "tiny" else preset("gpt-1b3").model
    # SwiGLU has three matrices instead of two, so d_ff shrinks to two thirds, rounded up to a multiple of 128.
    swiglu = {"mlp": "swiglu", "d_ff": -(-config.d_ff * 2 // 3 // 128) * 128}
    return replace(config, **swiglu) if name.startswith("llama") else config


def weight_bytes(size: Row) -> int:
    """Returns the size in bytes of all weight matrices that a token reads."""
    config = gpt_config_from(size["model"])
    num_weights = config.flops(1, 1) / 6 - config.num_layers * config.num_heads * config.head_size
    return int(num_weights) * jnp.dtype(config.compute_dtype).itemsize


def time_generation(request: Row) -> None:
    """Times generation with jgraph, per token. Entry point of the candidate process."""
    config = gpt_config_from(request["model"])
    if request["variant"] == "xla":
        decoding.has_matvec = lambda *_: False
    model = jgraph.functional(lambda: GPT(config, rngs=nnx.Rngs(0)))
    dtype = jnp.dtype(config.compute_dtype)
    params = jax.jit(lambda: jax.tree.map(lambda leaf: leaf.astype(dtype), model.init()[0]))()
    prompt = np.random.default_rng(0).integers(0, config.vocab_size, request["prompt"])

    def run() -> None:
        jgraph.generate(model, params, [prompt], max_tokens=request["new"], temperature=0)

    run()
    answer(device=first_devices(1)[0].device_kind, moved_bytes=weight_bytes(request))
    take_turns(lambda timer: timer.per_token(run, lambda: None, request["new"]))


def section(name: str, result: Row) -> Section:
    """Returns the table layout of a work."""
    size = result["size"]

    def share_of_bound(row: Row) -> str:
        device = find(row.get("device", ""))
        return f"{weight_bytes(size) / device.copy_bytes_per_second / row['ms'] * 1e3:.1%}" if device else ""

    return Section(
        f"{name}, {size['prompt']} prompt tokens, {size['new']} new tokens",
        {
            "variant": row_name,
            "time per token, ms": number("ms", ".3f"),
            "fastest, slowest, ms": spread,
            "tokens/s": lambda row: f"{1e3 / row['ms']:.0f}",
            "lower bound / time": share_of_bound,
            "time / jgraph": against_first(result),
            **columns("power, W", "clock, MHz"),
        },
    )


BENCHMARK = Benchmark("Greedy text generation, one prompt", __doc__, DecodeOptions, works, section)

if __name__ == "__main__":
    time_generation(read_request())
