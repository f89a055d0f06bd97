"""Bytes of a sharded step by the dtype rules, compiled for four H200s that need not be here.

    python -m jgraph.xla.aot install
    python -m benchmarks.dtype_rules

A row is one choice of --main-params-dtype, --main-grads-dtype, --decoupled-grad and --on-dtype-mismatch. Every state that is
compiled is proven to be updated in place. The peak of a step's temporaries is in its backward, where a cast of the gradient is
not yet made, so the update is compiled alone too: `more` is what its temporaries have more than with the gradient as it is.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness import environment, line, write_results
from jgraph.errors import ConfigError
from jgraph.parallel.objective import Sums
from jgraph.training.config import TrainConfig
from jgraph.training.setup import TrainSetup
from jgraph.xla import aot, check_identity, compile_and_report
from jgraph_models.gpt import GPTConfig

RANKS = 4
MODEL = GPTConfig(num_layers=4, d_model=1024, num_heads=8, num_kv_heads=8, d_ff=4096, vocab_size=8192, attention="xla")
CONFIG = TrainConfig(steps=10, batch_size=16, num_microbatches=2, seq_len=512, fsdp=RANKS, model=MODEL)
DTYPES = "float32", "bfloat16"


def main() -> None:
    aot.install()
    rows = [row(*choice) for choice in itertools.product(DTYPES, DTYPES, ("decoupled", "error", "copy"))]
    for one in rows:
        same = next(r for r in rows if (r["params"], r["grads"], r["rule"]) == (one["params"], one["grads"], "decoupled"))
        one["more"] = None if "refused" in one else one["update"] - same["update"]
    columns = ["params", "grads", "rule", "the optimizer reads", "bytes: params", "main_grad", "moments", "step's temporaries"]
    columns += ["update's", "more"]
    lines = [line(columns), "|---" * len(columns) + "|"]
    for one in rows:
        cells = [one["refused"], *[""] * 6] if "refused" in one else [one["reads"], *(f"{one[name]:,}" for name in _BYTES)]
        lines.append(line([one["params"], one["grads"], one["rule"], *cells]))
    text = "\n".join(["# Dtype rules, bytes of a device", "", *lines]) + "\n"
    write_results("dtype_rules", {"environment": environment(), "config": dataclasses.asdict(CONFIG), "rows": rows}, text)
    print(text)


_BYTES = "params_bytes", "grads_bytes", "moments_bytes", "temporaries", "update", "more"


def row(params: str, grads: str, rule: str) -> dict[str, Any]:
    """One choice; what it takes of each device."""
    about: dict[str, Any] = {"params": params, "grads": grads, "rule": rule}
    rules: dict[str, Any] = {"decoupled_grad": True} if rule == "decoupled" else {"on_dtype_mismatch": rule}
    try:
        config = dataclasses.replace(CONFIG, main_params_dtype=params, main_grads_dtype=grads, **rules)
    except ConfigError:
        return about | {"refused": "refused, with the flags that would help"}
    setup = TrainSetup.of(config)
    setup = setup.on(aot.devices(RANKS))
    state, tokens_BS = setup.step.state, setup.tokens()
    _, sums = jax.eval_shape(setup.step.bound.loss_and_grads, state.params, tokens_BS, jax.random.key(0), {})
    compiled, _ = compile_and_report(setup.step.lower(tokens_BS), setup.options("gpu"), platform="gpu")
    check_identity(compiled, state)
    return about | {
        "reads": f"main_grad, {grads}" if config.read_dtype == grads else f"a cast of it, {config.read_dtype}",
        "params_bytes": share(state.params),
        "grads_bytes": share(sums),
        "moments_bytes": share(state.opt_state),
        "temporaries": temporaries(compiled),
        "update": update_bytes(setup, state, sums),
    }


def update_bytes(setup: TrainSetup, state: Any, sums: Any) -> int:
    """Temporaries of the update alone, from gradients as the step sums them."""
    step = setup.step
    grads = jax.tree.map(lambda g, p: jax.ShapeDtypeStruct(g.shape, g.dtype, sharding=p.sharding), sums, state.params)
    one = jnp.ones((), jnp.float32)
    update = jax.jit(lambda state, grads: step.update(state, Sums(one, one, {}, {}), grads), donate_argnums=0, keep_unused=True)
    return temporaries(update.lower(state, grads).compile())


def temporaries(compiled: jax.stages.Compiled) -> int:
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def share(tree: Any) -> int:
    """Bytes of a device; every array is cut evenly, but for optax's counters."""
    return sum(leaf.size * leaf.dtype.itemsize // (RANKS if leaf.ndim else 1) for leaf in jax.tree.leaves(tree))


if __name__ == "__main__":
    main()
