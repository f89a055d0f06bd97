"""Compares the GPT and its training step with PyTorch in float32. PyTorch in float64 is the reference."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

torch = pytest.importorskip("torch")

from flax import nnx  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

from jgraph.pipeline import Pipelined  # noqa: E402
from jgraph.schedule import generate  # noqa: E402
from jgraph.step import elementwise, train_step  # noqa: E402
from jgraph.strategies import Replicated  # noqa: E402
from jgraph.train.config import OptimizerConfig  # noqa: E402
from jgraph.train.optimizer import adamw  # noqa: E402
from jgraph_models import gpt  # noqa: E402
from jgraph_models.gpt import GPTConfig  # noqa: E402
from tests.parity import weights  # noqa: E402

pytestmark = pytest.mark.parity

Arrays = dict[str, np.ndarray]

# The epsilon and the rotary base differ enough from their defaults that the tests detect an ignored setting.
_MODEL = GPTConfig(
    num_layers=2, d_model=32, num_heads=4, num_kv_heads=4, d_ff=64, vocab_size=61, norm_eps=1e-3, rope_theta=100.0,
    compute_dtype="float32", loss_chunk=16,
)  # fmt: skip
CASES = {
    "gelu, tied, MHA": _MODEL,
    # One of its four frequencies is unchanged, one is divided, and two are interpolated.
    "swiglu, untied, GQA": dataclasses.replace(
        _MODEL, mlp="swiglu", head="untied", num_kv_heads=2, rope_scaling="llama3", rope_original_length=64
    ),
}
GELU, SWIGLU = CASES
# Only some of the ten steps are clipped. Adam ignores the gradient scale, so clipping all steps alike would hardly change them.
OPTIMIZER = OptimizerConfig(learning_rate=5e-3, warmup_steps=3, weight_decay=0.5, clip_norm=2.6)
STEPS, MICROBATCHES, BATCH, LENGTH = 10, 2, 4, 16

RTOL = 1e-5
# If jgraph and PyTorch in float32 differ by more than RTOL, both sums are rounded in different orders, and float64 is the
# reference. PyTorch's largest error over an array then measures the rounding error, and jgraph's error may have the same size.
# The largest of about a thousand rounding errors varies by less than 4 between orders (measured: 1.0 for gradients, 1.8 for
# weights after ten steps).
ROUNDING = 4
# A wrong layer must exceed the allowed error by this factor.
CAUGHT = 100


def misses(ours: Arrays, torch32: Arrays, torch64: Arrays) -> dict[str, float]:
    """Returns the largest error of each array relative to the allowed error. Arrays agree up to 1."""
    assert ours.keys() == torch32.keys() == torch64.keys()
    return {name: _miss(ours[name], torch32[name], torch64[name]) for name in ours}


def _miss(ours: np.ndarray, torch32: np.ndarray, torch64: np.ndarray) -> float:
    assert ours.shape == torch32.shape == torch64.shape
    assert ours.dtype == torch32.dtype == np.float32
    ours, torch32 = ours.astype(np.float64), torch32.astype(np.float64)
    rounding = np.abs(torch32 - torch64).max()
    assert rounding <= 1e-4 * np.abs(torch64).max(), "PyTorch's own float32 is too far from float64 to measure anything by it"
    allowed = RTOL * np.abs(torch64) + ROUNDING * rounding
    far = np.abs(ours - torch32) > RTOL * np.abs(torch32)
    return float(np.max(np.abs(ours - torch64) / np.maximum(allowed, 1e-45), where=far, initial=0))


def assert_agrees(ours: Arrays, torch32: Arrays, torch64: Arrays) -> None:
    wrong = {name: miss for name, miss in misses(ours, torch32, torch64).items() if not miss <= 1}
    assert not wrong, f"errors beyond rounding, relative to the allowed error: {wrong}"


def assert_caught(ours: Arrays, torch32: Arrays, torch64: Arrays) -> None:
    """Checks that the comparison fails by more than the factor `CAUGHT`."""
    with pytest.raises(AssertionError, match="beyond rounding"):
        assert_agrees(ours, torch32, torch64)
    worst = max(misses(ours, torch32, torch64).values())
    print(f"error: {worst:.3g} times the allowed error")
    assert worst > CAUGHT


def tokens(steps: int = 1) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 61, (steps, BATCH, LENGTH + 1)).astype(np.int32)


# --- PyTorch ---


def numpy(tensor) -> np.ndarray:
    return tensor.detach().numpy().copy()


@functools.cache
def torch_pass(case: str, dtype: torch.dtype) -> Arrays:
    """Returns the logits, the loss and every gradient of one pass."""
    model = weights.torch_model(CASES[case], weights.draw(CASES[case]), dtype)
    tokens_BS = torch.tensor(tokens()[0], dtype=torch.int64)
    loss = model.loss(tokens_BS)
    loss.backward()
    gradients = {f"gradient of {name}": numpy(p.grad) for name, p in model.named_parameters()}
    return {"logits": numpy(model(tokens_BS[:, :-1])), "loss": numpy(loss)} | gradients


@functools.cache
def torch_training(case: str, dtype: torch.dtype, steps: int = STEPS) -> Arrays:
    """Trains a model. Returns the losses, the gradient norms and the final weights."""
    model = weights.torch_model(CASES[case], weights.draw(CASES[case]), dtype)
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) is is_matrix] for is_matrix in (True, False))
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": OPTIMIZER.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
        eps=OPTIMIZER.eps,
    )
    losses, norms = [], []
    for step, tokens_BS in enumerate(torch.tensor(tokens(steps), dtype=torch.int64)):
        for group in adamw.param_groups:
            group["lr"] = learning_rate(step, steps)
        adamw.zero_grad()
        loss = sum(model.loss(part) / MICROBATCHES for part in tokens_BS.chunk(MICROBATCHES))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_norm))
        adamw.step()
        losses.append(loss)
    metrics = {"losses": numpy(torch.stack(losses)), "gradient norms": numpy(torch.stack(norms))}
    return metrics | {name: numpy(p) for name, p in model.named_parameters()}


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up from peak / warmup to the peak, then cosine decay to a fraction of the peak."""
    peak, warmup = OPTIMIZER.learning_rate, OPTIMIZER.warmup_steps
    if step < warmup:
        return peak * (1 / warmup + (1 - 1 / warmup) * step / warmup)
    end = peak * OPTIMIZER.final_learning_rate
    return end + (peak - end) * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2


def references(compute, case: str, *args: int) -> tuple[Arrays, Arrays]:
    return compute(case, torch.float32, *args), compute(case, torch.float64, *args)


# --- jgraph ---


def new_pass(config: GPTConfig):
    """Returns a jitted (params, tokens) -> (logits, loss, gradients). It is traced anew, so that it uses patched functions."""
    graphdef = nnx.split(nnx.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0))), nnx.Param)[0]

    @jax.jit
    def run(params, tokens_BS):
        loss, grads = jax.value_and_grad(lambda p: nnx.merge(graphdef, p).loss(tokens_BS))(params)
        return nnx.merge(graphdef, params).logits(tokens_BS[:, :-1]), loss, grads

    return run


unpatched_pass = functools.cache(new_pass)


def our_pass(config: GPTConfig, arrays: Arrays, run=None) -> Arrays:
    logits, loss, grads = (run or unpatched_pass(config))(weights.tree(config, arrays), tokens()[0])
    gradients = {f"gradient of {name}": g for name, g in weights.named(grads).items()}
    return {"logits": np.asarray(logits), "loss": np.asarray(loss)} | gradients


def our_training(config: GPTConfig, *, settings=OPTIMIZER, decay_vectors=False, before=lambda state: state, scale=1) -> Arrays:
    """Trains like `jgraph.train`: with packed parameters, its optimizer and its step.

    Args:
        config: Configuration of the model.
        settings: Configuration of the optimizer.
        decay_vectors: Whether to apply weight decay to vectors, which is an error.
        before: Function that changes the state before the first step.
        scale: Factor of the differentiated loss.
    """
    graphdef = nnx.split(nnx.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0))), nnx.Param)[0]
    params = weights.tree(config, weights.draw(config))

    def transform(is_matrix):
        return adamw(settings, STEPS, decay_mask=jax.tree.map(lambda decayed: decayed or decay_vectors, is_matrix))

    def loss(params, tokens_BS, key):
        return scale * nnx.merge(graphdef, params).loss(tokens_BS)

    choices = {"num_microbatches": MICROBATCHES, "clip_norm": settings.clip_norm}
    step = train_step(loss, elementwise(transform), Replicated(None, params), **choices)
    metrics, state = run_steps(step, before(step.init(params)), STEPS)
    return metrics | weights.named(step.bound.layout.unpack(state.params))


def run_steps(step, state, steps: int):
    """Runs `steps` steps. Returns the losses and gradient norms, and the final state."""
    # Other tests compile with optimization level 0. Its rounding reaches 1.2 times the allowed error after ten steps.
    run = step.compile(step.place(tokens()[0]), xla_options=("xla_backend_optimization_level=1",))
    losses, norms = [], []
    for tokens_BS in tokens(steps):
        state, metrics = run(state, step.place(tokens_BS))
        losses.append(metrics.loss)
        norms.append(metrics.grad_norm)
    return {"losses": np.stack(losses), "gradient norms": np.stack(norms)}, state


def our_pipeline(config: GPTConfig, steps: int, schedule: str) -> Arrays:
    """Trains the same model on two pipeline ranks. Each rank has one layer and half of the padded vocabulary."""
    params = weights.tree(config, weights.draw(config))
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("data", "pipe"))
    parts = gpt.pipeline_model(config, 2)
    strategy = Pipelined(mesh, params, generate(schedule, pp=2, microbatches=MICROBATCHES))
    transform = elementwise(lambda is_matrix: adamw(OPTIMIZER, steps, decay_mask=is_matrix))
    step = train_step(parts, transform, strategy, num_microbatches=MICROBATCHES, clip_norm=OPTIMIZER.clip_norm)
    metrics, state = run_steps(step, step.init(params), steps)
    return metrics | weights.named(step.bound.layout.unpack(state.params))


# --- Comparison ---


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_every_gradient_equal_pytorch(case):
    assert_agrees(our_pass(CASES[case], weights.draw(CASES[case])), *references(torch_pass, case))


@pytest.mark.parametrize("case", CASES)
def test_every_weight_after_ten_steps_equals_pytorch(case):
    assert_agrees(our_training(CASES[case]), *references(torch_training, case))


@pytest.mark.parametrize(("case", "schedule"), [(GELU, "aligned"), (SWIGLU, "1f1b")])
def test_pipeline_losses_and_weights_over_twenty_steps_equal_pytorch(case, schedule):
    assert_agrees(our_pipeline(CASES[case], 20, schedule), *references(torch_training, case, 20))


@pytest.mark.parametrize("case", CASES)
def test_only_some_of_the_ten_steps_are_clipped(case):
    clipped = torch_training(case, torch.float64)["gradient norms"] > OPTIMIZER.clip_norm
    assert 2 <= clipped.sum() <= STEPS - 2


# --- Typical porting errors are detected ---


def edit(arrays: Arrays, name: str, change) -> Arrays:
    return {key: change(value) if key.endswith(name) else value for key, value in arrays.items()}


def with_heads(change):
    """Returns a mutation that applies `change` to the query and key heads of every block."""

    def mutate(arrays: Arrays, config: GPTConfig) -> Arrays:
        def one(matrix):
            by_head = matrix.copy().reshape(-1, config.head_size, config.d_model)
            turned = config.num_heads + config.num_kv_heads
            by_head[:turned] = change(by_head[:turned], config)
            return by_head.reshape(matrix.shape)

        return edit(arrays, "qkv.weight", one)

    return mutate


def queries_and_keys_swapped(by_head, config):
    return np.concatenate([by_head[config.num_heads :], by_head[: config.num_heads]])


def rotated_by_the_negative_angle(by_head, config):
    # Rotation by the negative angle equals rotation by the angle with the halves of each head swapped.
    return np.roll(by_head, config.head_size // 2, axis=1)


def rotated_in_interleaved_pairs(by_head, config):
    # The interleaved pairs (2i, 2i+1) are the pairs (i, i + K/2) of permuted heads.
    return np.concatenate([by_head[:, ::2], by_head[:, 1::2]], axis=1)


def without_the_root_of_the_head_size(by_head, config):
    by_head[: config.num_heads] *= config.head_size**0.5
    return by_head


def query_heads_grouped_by_modulo(by_head, config):
    # Head h reads key head h mod G instead of h // (H / G).
    order = np.arange(config.num_heads).reshape(-1, config.num_kv_heads).T.ravel()
    by_head[: config.num_heads] = by_head[order]
    return by_head


def blocks_swapped(arrays, config):
    other = {"0": "1", "1": "0"}
    return {
        name: arrays[f"blocks.{other[name[7]]}{name[8:]}"] if name.startswith("blocks.") else value
        for name, value in arrays.items()
    }


def gate_and_up_swapped(arrays, config):
    return edit(arrays, "up.weight", lambda matrix: np.roll(matrix, config.d_ff, axis=0))


def scale_dropped(name):
    return lambda arrays, config: edit(arrays, name, np.ones_like)


WEIGHTS = {
    "queries and keys swapped": (GELU, with_heads(queries_and_keys_swapped)),
    "rotary by the negative angle": (GELU, with_heads(rotated_by_the_negative_angle)),
    "rotary in interleaved pairs": (GELU, with_heads(rotated_in_interleaved_pairs)),
    "attention without 1/sqrt(K)": (GELU, with_heads(without_the_root_of_the_head_size)),
    "query heads grouped by modulo": (SWIGLU, with_heads(query_heads_grouped_by_modulo)),
    "blocks swapped": (GELU, blocks_swapped),
    "gate and up swapped": (SWIGLU, gate_and_up_swapped),
    "attention norm without its scale": (GELU, scale_dropped("0.attention_norm.scale")),
    "mlp norm without its scale": (GELU, scale_dropped("1.mlp_norm.scale")),
    "last norm without its scale": (GELU, scale_dropped("norm.scale")),
}


@pytest.mark.parametrize("mutation", WEIGHTS)
def test_misplaced_weights_are_detected(mutation):
    case, mutate = WEIGHTS[mutation]
    arrays = mutate(weights.draw(CASES[case]), CASES[case])
    ours, torch32, torch64 = (
        {name: value for name, value in result.items() if "gradient" not in name}  # the gradients would be misplaced as well
        for result in (our_pass(CASES[case], arrays), *references(torch_pass, case))
    )
    assert_caught(ours, torch32, torch64)


@pytest.mark.parametrize(
    "mutation", [{"rope_theta": 10_000.0}, {"norm_eps": 1e-5}], ids=["default rotary base", "default epsilon"]
)
def test_an_ignored_setting_is_detected(mutation):
    config = dataclasses.replace(CASES[GELU], **mutation)
    assert_caught(our_pass(config, weights.draw(config)), *references(torch_pass, GELU))


def without_mask(monkeypatch):
    attention = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *args, is_causal, **kwargs: attention(*args, **kwargs))


def with_exact_gelu(monkeypatch):
    monkeypatch.setattr(gpt, "gelu", lambda x: jax.nn.gelu(x, approximate=False))


def with_an_untied_head(monkeypatch):
    output = gpt.GPT.output
    monkeypatch.setattr(gpt.GPT, "output", lambda model: jax.lax.stop_gradient(output(model)))


@pytest.mark.parametrize("mutate", [without_mask, with_exact_gelu, with_an_untied_head], ids=lambda mutate: mutate.__name__)
def test_a_wrong_layer_is_detected(mutate, monkeypatch):
    mutate(monkeypatch)
    ours = our_pass(CASES[GELU], weights.draw(CASES[GELU]), new_pass(CASES[GELU]))
    assert_caught(ours, *references(torch_pass, GELU))


def without_bias_correction(state):
    """Sets the step count of Adam to one million, so that 1 - beta**count is 1."""

    def one(node):
        return node._replace(count=jnp.full_like(node.count, 10**6)) if isinstance(node, optax.ScaleByAdamState) else node

    opt_state = jax.tree.map(one, state.opt_state, is_leaf=lambda node: isinstance(node, optax.ScaleByAdamState))
    return dataclasses.replace(state, opt_state=opt_state)


TRAINING = {
    "gradients summed, not averaged": {"scale": MICROBATCHES},
    "weight decay of vectors": {"decay_vectors": True},
    "another beta2": {"settings": dataclasses.replace(OPTIMIZER, beta2=0.999)},
    "no bias correction": {"before": without_bias_correction},
    "no clipping": {"settings": dataclasses.replace(OPTIMIZER, clip_norm=1e9)},
    "no warm-up": {"settings": dataclasses.replace(OPTIMIZER, warmup_steps=0)},
    "the cosine ends at zero": {"settings": dataclasses.replace(OPTIMIZER, final_learning_rate=0.0)},
}


@pytest.mark.parametrize("mutation", TRAINING)
def test_a_wrong_update_is_detected_in_the_weights(mutation):
    ours, torch32, torch64 = (
        {name: value for name, value in result.items() if name not in ("losses", "gradient norms")}
        for result in (our_training(CASES[GELU], **TRAINING[mutation]), *references(torch_training, GELU))
    )
    assert_caught(ours, torch32, torch64)
