"""Tests that `jgraph.elementwise` accepts elementwise transforms and refuses all others before compiling."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib

import jgraph

SHAPES = {
    "embed": {"embedding": jax.ShapeDtypeStruct((512, 256), jnp.float32)},
    "blocks": [
        {"up": {"kernel": jax.ShapeDtypeStruct((256, 130), jnp.float32), "bias": jax.ShapeDtypeStruct((130,), jnp.float32)}}
        for _ in range(2)
    ],
    "scale": jax.ShapeDtypeStruct((), jnp.float32),
}


def make(transform, shapes=SHAPES):
    """Creates a step with a transform declared elementwise. Compiles nothing."""
    loss = lambda params, batch, key: jnp.float32(0)  # noqa: E731
    return jgraph.train_step(loss, jgraph.elementwise(transform), jgraph.Replicated(None, shapes))


def matrices_by_shape(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def embedding_by_path(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: "embedding" in jax.tree_util.keystr(path), params)


def divided_by_previous_norm():
    def update(grads, norm, params=None):
        return jax.tree.map(lambda grad: grad / (1 + norm), grads), optax.tree.norm(grads)

    return optax.GradientTransformation(lambda params: jnp.zeros(()), update)


def power_of_leaf(grads, params):
    leaves, structure = jax.tree.flatten(grads)
    return structure.unflatten([leaf ** (2 + i) for i, leaf in enumerate(leaves)])


def flipped_by_sum(grads, params):
    return jax.tree.map(lambda grad: jax.lax.cond(jnp.sum(grad) > 0, jnp.negative, jnp.positive, grad), grads)


def skipped_unless(combine, *conditions):
    """Skips an update unless conditions hold on all elements of the arrays; a further array has the last condition."""

    def update(grads, params):
        leaves = jax.tree.leaves(grads)
        of_arrays = [conditions[min(i, len(conditions) - 1)](leaf).all() for i, leaf in enumerate(leaves)]
        return jax.tree.map(lambda grad: jnp.where(functools.reduce(combine, of_arrays), grad, 0), grads)

    return optax.stateless(update)


SLOW_START = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 2000, 10_000)

ELEMENTWISE = {
    "sgd": optax.sgd(0.1),
    "sgd with a rate of zero": optax.sgd(0.0),
    "sgd with momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(1e-3),
    "adam with a rate that overflows": optax.adam(1e38),
    "adam with a moment in bfloat16": optax.adam(1e-3, mu_dtype=jnp.bfloat16),
    "adamw": optax.adamw(1e-3),
    "adamw masked by a function of the matrices": lambda matrices: optax.adamw(1e-3, mask=matrices),
    "adamw with a schedule": optax.adamw(SLOW_START),
    "lion": optax.lion(1e-4),
    "adagrad": optax.adagrad(0.1),
    "yogi": optax.yogi(0.1),
    "clipping by value": optax.chain(optax.clip(1.0), optax.trace(0.9), optax.scale_by_learning_rate(SLOW_START)),
    "hyperparameters in the state": optax.inject_hyperparams(optax.adamw)(SLOW_START),
    "accumulation": optax.MultiSteps(optax.adam(1e-3), 3),
    "accumulation as a transform": optax.MultiSteps(optax.adam(1e-3), 3).gradient_transformation(),
    "skipping of gradients that are not finite": optax.apply_if_finite(optax.adam(1e-3), 3),
    "a plateau of the loss": optax.chain(optax.adam(1e-3), contrib.reduce_on_plateau(patience=1)),
    "skipping unless all elements are positive": skipped_unless(jnp.logical_and, lambda leaf: leaf > 0),
    "a schedule-free average": contrib.schedule_free_adamw(1e-3),
}

COUPLED = {
    "clipping by the global norm": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
    "clipping by a large global norm": optax.chain(optax.clip_by_global_norm(50.0), optax.sgd(0.1)),
    "clipping by the norm of each array": optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(0.1)),
    "adaptive clipping": optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
    "muon": contrib.muon(1e-3),
    "accumulation for muon": optax.MultiSteps(contrib.muon(1e-3), 3),
    "adafactor": optax.adafactor(1e-3),
    "factored moments of large matrices": optax.scale_by_factored_rms(),
    "lamb": optax.lamb(1e-3),
    "lars": optax.lars(0.1),
    "l-bfgs": optax.lbfgs(0.1, linesearch=None),
    "polyak's rate": optax.polyak_sgd(),
    "prodigy's rate": contrib.prodigy(1.0),
    "decay masked by shape": optax.adamw(1e-3, mask=matrices_by_shape),
    "little decay masked by shape": optax.chain(optax.add_decayed_weights(1e-4, mask=matrices_by_shape), optax.sgd(0.1)),
    "decay masked by path": optax.adamw(1e-3, mask=embedding_by_path),
    "decay masked by a tree": optax.adamw(1e-3, mask=matrices_by_shape(SHAPES)),
    "rates by path": optax.partition({True: optax.sgd(0.1), False: optax.adam(1e-3)}, embedding_by_path),
    "the norm of the previous gradient": divided_by_previous_norm(),
    "another power for each leaf": optax.stateless(power_of_leaf),
    "another condition for the first array": skipped_unless(jnp.logical_and, jnp.isfinite, lambda leaf: leaf > 0),
    "a condition on any array": skipped_unless(jnp.logical_or, jnp.isfinite),
    "a function that is not called": optax.adamw,
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_elementwise_transform_is_accepted(name):
    assert "TrainStep" in repr(make(ELEMENTWISE[name]))


@pytest.mark.parametrize("name", COUPLED)
def test_a_transform_that_is_not_elementwise_is_refused_when_the_step_is_created(name):
    with pytest.raises(jgraph.ConfigError, match="leave out `elementwise`") as error:
        make(COUPLED[name])
    assert error.value.field == "transform"
    assert "\n" not in str(error.value)


def test_a_branch_on_the_sum_of_an_array_is_refused():
    # Without scalars: for these, the sum is the element itself.
    with pytest.raises(jgraph.ConfigError, match="leave out `elementwise`"):
        make(optax.stateless(flipped_by_sum), SHAPES["blocks"])


def test_a_refused_transform_works_without_the_declaration():
    loss = lambda params, batch, key: jnp.mean((batch @ params["w"]) ** 2)  # noqa: E731
    params, batch = {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}, jnp.ones((2, 4))
    step = jgraph.train_step(loss, COUPLED["clipping by the global norm"], jgraph.Replicated(None, params))
    state, _ = step.compile(batch)(step.init(params), batch)
    assert not jnp.array_equal(step.canonical.of(state).params["w"], params["w"])


def test_checking_a_transform_compiles_nothing():
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    try:
        make(optax.adamw(3e-3))
    finally:
        jax.monitoring.clear_event_listeners()
    assert not [name for name in compiled if "backend_compile" in name]


def test_a_transform_is_checked_without_a_cpu_backend(monkeypatch):
    def unknown(*args, **kwargs):
        raise RuntimeError("Unknown backend cpu")

    monkeypatch.setattr(jax, "local_devices", unknown)
    make(optax.adam(1e-3))
    with pytest.raises(jgraph.ConfigError, match="computes other updates"):
        make(COUPLED["clipping by the global norm"])


@pytest.mark.parametrize("transform", ["adam", 3, None])
def test_elementwise_needs_a_transform_or_a_function(transform):
    with pytest.raises(jgraph.ConfigError, match="must be an optax transform") as error:
        jgraph.elementwise(transform)
    assert error.value.field == "transform"


def test_a_function_of_the_matrices_must_return_a_transform():
    with pytest.raises(jgraph.ConfigError, match="`transform` returns 3: must make an optax transform"):
        make(lambda matrices: 3)
