"""Direct preference optimization (Rafailov et al., arXiv:2305.18290) of a tiny GPT, on made-up pairs of answers.

python examples/dpo.py
"""

# B pairs, A = 2 answers of a pair (chosen, rejected), S tokens of prompt and answer, padded

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jgraph
from jgraph_models.gpt import GPT, GPTConfig

BETA = 0.1
CONFIG = GPTConfig(num_layers=2, d_model=32, num_heads=2, num_kv_heads=2, d_ff=64, vocab_size=32, compute_dtype="float32")
MODEL = jgraph.functional(lambda: GPT(CONFIG, rngs=nnx.Rngs(0)))


def answer_log_probs(params, tokens_BAS, is_answer_BAS):
    """Returns the sum of the log probabilities of the tokens of each answer, [B, A]."""
    tokens_NS = tokens_BAS.reshape(-1, tokens_BAS.shape[-1])
    logits_NTV = MODEL.evaluate("logits", params, {}, tokens_NS[:, :-1])
    log_probs_NT = -optax.softmax_cross_entropy_with_integer_labels(logits_NTV, tokens_NS[:, 1:])
    return jnp.sum(is_answer_BAS[..., 1:] * log_probs_NT.reshape(*tokens_BAS.shape[:2], -1), axis=-1)


def loss(params, batch, key):
    """Returns the sum over pairs of -log sigmoid(margin), equation 7 of the paper."""
    log_probs_BA = answer_log_probs(params, batch["tokens"], batch["is_answer"])
    rewards_BA = BETA * (log_probs_BA - batch["reference"])
    margins_B = rewards_BA[:, 0] - rewards_BA[:, 1]
    sums = {"margin": jnp.sum(margins_B), "accuracy": jnp.sum(margins_B > 0)}
    return jgraph.Loss(-jnp.sum(jax.nn.log_sigmoid(margins_B)), jnp.float32(len(margins_B)), sums)


def pairs_of(rng, count=32, prompt=6, longest=10):
    """Returns pairs with a common prompt. The chosen answer has even tokens, the rejected answer odd tokens."""
    tokens_BAS = rng.integers(CONFIG.vocab_size, size=(count, 2, prompt + longest))
    tokens_BAS[:, 1, :prompt] = tokens_BAS[:, 0, :prompt]
    tokens_BAS[:, :, prompt:] = tokens_BAS[:, :, prompt:] // 2 * 2 + np.array([0, 1])[None, :, None]
    ends_BA1 = prompt + rng.integers(3, longest + 1, size=(count, 2, 1))
    positions_S = np.arange(prompt + longest)
    is_answer_BAS = (prompt <= positions_S) & (positions_S < ends_BA1)
    tokens_BAS = np.where(positions_S < ends_BA1, tokens_BAS, 0)
    return {"tokens": tokens_BAS.astype(np.int32), "is_answer": is_answer_BAS.astype(np.float32)}


def main():
    reference, _ = MODEL.init()  # the model before DPO, usually from `jgraph.load`
    reference_log_probs = jax.jit(answer_log_probs)

    def batches(rng):
        while True:
            pairs = pairs_of(rng)
            yield pairs | {"reference": reference_log_probs(reference, pairs["tokens"], pairs["is_answer"])}

    data = batches(np.random.default_rng(0))
    step = jgraph.train_step(loss, optax.adam(1e-3), jgraph.Replicated(None, MODEL.shapes), num_microbatches=2)
    run, state = step.compile(next(data)), step.init(reference)
    for i, batch in zip(range(61), data, strict=False):
        state, metrics = run(state, step.place(batch))
        if i % 20 == 0:
            margin, accuracy = metrics.aux["margin"], metrics.aux["accuracy"]
            print(f"step {i}: loss {metrics.loss:.4f}, margin {margin:.4f}, accuracy {accuracy:.2f}")


if __name__ == "__main__":
    main()
