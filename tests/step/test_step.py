"""Tests the step on a linear model with a known gradient: y = x·w + b, mean squared error."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jgraph.errors import DonationError, NonFiniteError
from jgraph.step import train_step
from jgraph.strategies import Replicated
from jgraph.train.config import OptimizerConfig
from jgraph.train.optimizer import adamw as configured

CONSTANT = {"learning_rate": 0.5, "final_learning_rate": 1.0, "warmup_steps": 0}
MICROBATCHES = [1, 4]  # one without, and several in a loop


def squared_error(params, batch_BS):
    return jnp.mean((batch_BS[:, :-1] @ params["w"] + params["b"] - batch_BS[:, -1:]) ** 2)


def new_params():
    return {"b": jnp.full(1, 0.5), "w": jnp.linspace(-1, 1, 8)[:, None]}


def adamw(steps=100, **fields):
    return configured(OptimizerConfig(**fields), steps, decay_mask={"b": False, "w": True})


@pytest.fixture
def batch():
    return np.random.default_rng(0).standard_normal((32, 9)).astype(np.float32)


def step_of(transform=None, *, loss=squared_error, params=None, **settings):
    """Creates a step with a leaf of the state for each parameter, by default with plain gradient descent."""
    shapes = new_params() if params is None else params
    transform = optax.sgd(1.0) if transform is None else transform
    return train_step(
        lambda params, batch_BS, key: loss(params, batch_BS), transform, Replicated(None, shapes), layout="tree", **settings
    )


def run(batch, *, state=None, **settings):
    """Runs one step from `state`, or from new parameters. Does not donate `state`."""
    step = step_of(**settings)
    return step.compile(batch)(jax.tree.map(jnp.copy, state) if state else step.init(new_params()), batch)


def change(state):
    """Returns the change of the parameters."""
    return jax.tree.map(lambda new, old: new - old, state.params, new_params())


def assert_identical(actual, expected):
    """Compares bit by bit, so that NaN equals NaN and 0 differs from -0."""
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, np.asarray(a).tobytes()) == (e.dtype, np.asarray(e).tobytes())


# --- Accumulation ---


@pytest.mark.parametrize("num_microbatches", MICROBATCHES)
def test_any_number_of_microbatches_gives_the_gradient_of_the_whole_batch(batch, num_microbatches):
    state, _ = run(batch, num_microbatches=num_microbatches)
    expected = jax.grad(squared_error)(new_params(), batch)
    # A mean of 32 products in another order has at most 32 roundings of 2**-24, relative to the largest product.
    for moved, gradient in zip(jax.tree.leaves(change(state)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(-moved, gradient, atol=32 * 2**-24 * max(1, np.abs(gradient).max()))


@pytest.mark.parametrize("num_microbatches", MICROBATCHES)
def test_the_loss_of_a_step_is_the_mean_over_microbatches(batch, num_microbatches):
    _, metrics = run(batch, num_microbatches=num_microbatches)
    assert metrics.loss == pytest.approx(float(squared_error(new_params(), batch)), rel=1e-5)
    assert (metrics.loss.shape, metrics.loss.dtype) == ((), jnp.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_gradients_are_not_lost_in_accumulation(dtype):
    # The gradients of the microbatches are 1, 2**-9, 2**-9, ... In bfloat16, 1 + 2**-9 rounds to 1.
    batch = np.full((4, 1), 2.0**-9, np.float32)
    batch[0] = 1

    def loss(params, batch_BS):
        return (params["w"].astype(jnp.bfloat16) * batch_BS.astype(jnp.bfloat16)).sum().astype(jnp.float32)

    params = {"w": jnp.zeros(1, dtype)}
    step = step_of(loss=loss, params=params, params_dtype=dtype, num_microbatches=4)
    _, metrics = step.compile(batch)(step.init(params), batch)
    assert metrics.grad_norm == (1 + 3 * 2**-9) / 4


# --- Norm and clipping ---


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_the_gradient_norm_is_the_global_norm(batch, num_microbatches):
    _, metrics = run(batch, num_microbatches=num_microbatches)
    assert metrics.grad_norm == pytest.approx(float(optax.tree.norm(jax.grad(squared_error)(new_params(), batch))), rel=1e-5)


def test_square_sums_are_reported_per_leaf_in_tree_order(batch):
    _, metrics = run(batch)
    gradient = jax.grad(squared_error)(new_params(), batch)
    expected = [float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(gradient)]
    np.testing.assert_allclose(metrics.grad_square_sums, expected, rtol=1e-5)


def test_a_gradient_above_the_clip_norm_is_scaled_down_to_it(batch):
    state, metrics = run(batch, clip_norm=0.25)
    assert metrics.grad_norm > 0.25
    gradient = jax.grad(squared_error)(new_params(), batch)
    expected = jax.tree.map(lambda g: -0.25 * g / optax.tree.norm(gradient), gradient)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-6), change(state), expected)


def test_a_gradient_below_the_clip_norm_is_unchanged(batch):
    _, metrics = run(batch)
    limit = 1.01 * float(metrics.grad_norm)
    assert_identical(run(batch, clip_norm=limit)[0].params, run(batch)[0].params)


def test_the_reported_norm_is_the_norm_before_clipping(batch):
    assert run(batch, clip_norm=0.25)[1].grad_norm == run(batch)[1].grad_norm


def test_clipping_a_zero_gradient_does_not_divide_by_zero(batch):
    state, metrics = run(batch, loss=lambda params, batch_BS: 0 * params["w"].sum(), clip_norm=1.0)
    assert metrics.grad_norm == 0
    assert state.skipped == 0
    assert_identical(state.params, new_params())


# --- Frozen parameters ---


def test_the_gradient_norm_and_square_sums_exclude_frozen_parameters(batch):
    _, metrics = run(batch, freeze=("b",))
    gradient = jax.grad(squared_error)(new_params(), batch)
    assert abs(gradient["b"]) > 0.01
    assert metrics.grad_norm == pytest.approx(float(jnp.linalg.norm(gradient["w"])), rel=1e-5)
    assert metrics.grad_square_sums.shape == (1,)


def test_clipping_ignores_frozen_parameters(batch):
    state, _ = run(batch, freeze=("b",), clip_norm=0.25)
    assert float(optax.tree.norm(change(state))) == pytest.approx(0.25, rel=1e-5)
    assert change(state)["b"] == 0


def test_a_frozen_parameter_has_no_moments(batch):
    state, _ = run(batch, freeze=("b",), transform=adamw())
    for moments in (state.opt_state[0].mu, state.opt_state[0].nu):
        assert moments["b"] is None
        assert (moments["w"] != 0).all()


def test_frozen_parameters_are_stored_in_the_frozen_dtype(batch):
    state, _ = run(batch, freeze=("b",), frozen_dtype=jnp.bfloat16)
    assert (state.params["b"].dtype, state.params["w"].dtype) == (jnp.bfloat16, jnp.float32)


# --- Values that are not finite ---


def nan_loss(params, batch_BS):
    # The loss is NaN for a bad batch, but its gradient is finite.
    return squared_error(params, batch_BS) + jax.lax.stop_gradient(jnp.where(batch_BS[0, 0] == 77, jnp.nan, 0.0))


def infinite_slope(params, batch_BS):
    # sqrt(0) is finite and its derivative is infinite. Only the gradient of `b` is affected.
    return squared_error(params, batch_BS) + jnp.sqrt(jnp.where(batch_BS[0, 0] == 77, params["b"] - 0.5, 1.0)).sum()


@pytest.fixture
def bad_batch(batch):
    """Returns a batch with a bad value in its first microbatch."""
    batch = batch.copy()
    batch[0, 0] = 77
    return batch


@pytest.mark.parametrize("num_microbatches", MICROBATCHES)
@pytest.mark.parametrize("loss", [nan_loss, infinite_slope])
def test_a_nonfinite_step_does_not_change_parameters_and_optimizer_state(bad_batch, loss, num_microbatches):
    transform = adamw()
    # A state from the middle of a run has nonzero moments.
    state = step_of(transform).init(new_params())
    moments = jax.tree.map(lambda leaf: leaf + jnp.asarray(3, leaf.dtype), state.opt_state)
    state = type(state)(step=state.step + 5, skipped=state.skipped + 2, params=state.params, opt_state=moments)
    after, _ = run(bad_batch, state=state, loss=loss, transform=transform, num_microbatches=num_microbatches)
    assert_identical((after.params, after.opt_state), (state.params, state.opt_state))
    assert (after.step, after.skipped) == (6, 3)


def test_a_nonfinite_loss_with_a_finite_gradient_is_reported(bad_batch):
    _, metrics = run(bad_batch, loss=nan_loss)
    assert np.isnan(metrics.loss)
    assert np.isfinite(metrics.grad_norm)


def test_square_sums_identify_the_leaf_with_a_nonfinite_gradient(bad_batch):
    _, metrics = run(bad_batch, loss=infinite_slope)
    assert np.isfinite(metrics.loss)
    assert np.isfinite(metrics.grad_square_sums).tolist() == [False, True]


@pytest.mark.parametrize("loss", [nan_loss, infinite_slope])
def test_a_skipped_step_does_not_affect_later_steps(batch, bad_batch, loss):
    transform = adamw()
    after_bad, _ = run(bad_batch, loss=loss, transform=transform)
    after_both, _ = run(batch, state=after_bad, loss=loss, transform=transform)
    after_good, _ = run(batch, loss=loss, transform=transform)
    assert_identical((after_both.params, after_both.opt_state), (after_good.params, after_good.opt_state))
    assert (after_both.step, after_both.skipped) == (2, 1)


def test_a_finite_step_is_counted_as_done_and_not_as_skipped(batch):
    state, _ = run(batch)
    assert (state.step, state.skipped) == (1, 0)
    assert state.step.dtype == state.skipped.dtype == jnp.int32


# --- The optimizer ---


def learning_rates(steps, total, **fields):
    """Returns the learning rate of each step. With a constant gradient, Adam's update equals the learning rate."""
    transform = adamw(total, weight_decay=0.0, eps=1e-20, **fields)
    params = {"b": jnp.zeros(1), "w": jnp.zeros((1, 1))}

    def body(opt_state, _):
        updates, opt_state = transform.update(jax.tree.map(jnp.ones_like, params), opt_state, params)
        return opt_state, -updates["w"][0, 0]

    return np.asarray(jax.lax.scan(body, transform.init(params), None, length=steps)[1])


def test_warmup_increases_linearly_from_a_nonzero_first_step():
    rates = learning_rates(11, 100, learning_rate=1e-2, warmup_steps=10)
    assert rates[0] == pytest.approx(1e-3, rel=1e-4)
    assert rates[10] == pytest.approx(1e-2, rel=1e-4)
    np.testing.assert_allclose(np.diff(rates), 9e-4, rtol=1e-2)


def test_cosine_decay_ends_with_the_run_at_the_final_rate_and_stays_there():
    rates = learning_rates(120, 100, learning_rate=1e-2, warmup_steps=10, final_learning_rate=0.25)
    assert rates[55] == pytest.approx(1e-2 * (1 + 0.25) / 2, rel=1e-4), "half way"
    np.testing.assert_allclose(rates[100:], 2.5e-3, rtol=1e-4)
    assert (np.diff(rates[10:101]) < 0).all()


def test_without_warmup_the_first_step_has_the_peak_rate():
    assert learning_rates(1, 100, learning_rate=1e-2, warmup_steps=0)[0] == pytest.approx(1e-2, rel=1e-4)


def test_a_run_shorter_than_its_warmup_has_no_decay():
    rates = learning_rates(5, 5, learning_rate=1e-2, warmup_steps=10)
    np.testing.assert_allclose(rates, 1e-2 * (1 + 0.9 * np.arange(5)) / 10, rtol=1e-4)


def test_weight_decay_applies_to_matrices_but_not_to_vectors():
    transform = adamw(learning_rate=0.1, warmup_steps=0, weight_decay=0.5)
    params = new_params()
    updates, _ = transform.update(jax.tree.map(jnp.zeros_like, params), transform.init(params), params)
    np.testing.assert_allclose(updates["w"], -0.05 * params["w"], rtol=1e-5)
    np.testing.assert_array_equal(updates["b"], 0)


def test_betas_and_epsilon_come_from_the_configuration():
    transform = adamw(learning_rate=1.0, warmup_steps=0, weight_decay=0.0, beta1=0.5, beta2=0.75, eps=2.0)
    params = new_params()
    state = transform.init(params)
    for gradient in (1.0, -3.0):
        updates, state = transform.update(jax.tree.map(lambda p, g=gradient: jnp.full_like(p, g), params), state, params)
    mean, square = (0.5 * 0.5 * 1 - 0.5 * 3) / (1 - 0.5**2), (0.75 * 0.25 * 1 + 0.25 * 9) / (1 - 0.75**2)
    # The learning rate of the second of 100 steps is 0.9998 of the peak.
    np.testing.assert_allclose(updates["b"], -mean / (square**0.5 + 2), rtol=1e-3)


@pytest.mark.parametrize("second", ["float32", "bfloat16"])
@pytest.mark.parametrize("first", ["float32", "bfloat16"])
def test_moments_are_computed_in_float32_and_stored_in_the_requested_dtypes(first, second):
    # bfloat16 represents neither these values nor the moments computed from them.
    beta, gradient = 1 - 2**-9, 1 + 2**-9
    betas = {"beta1": beta, "beta2": beta, "eps": 1e-20, "weight_decay": 0.0}
    transform = adamw(**betas, **CONSTANT, first_moment_dtype=first, second_moment_dtype=second)
    params = {"b": jnp.zeros(1), "w": jnp.zeros((1, 1))}
    state, updates, mean, square = transform.init(params), params, 0.0, 0.0
    for _ in range(2):
        updates, state = transform.update(jax.tree.map(lambda p: jnp.full_like(p, gradient), params), state, params)
        mean = beta * float(jnp.asarray(mean, first)) + (1 - beta) * gradient
        square = beta * float(jnp.asarray(square, second)) + (1 - beta) * gradient**2
    for stored, moment, dtype in ((state[0].mu["b"], mean, first), (state[0].nu["b"], square, second)):
        assert stored.dtype == dtype
        np.testing.assert_allclose(stored.astype("float32"), float(jnp.asarray(moment, dtype)), rtol=1e-6)
    # 1 - beta**2 has 16 significant bits in float32.
    np.testing.assert_allclose(updates["b"], -0.5 * mean / np.sqrt(square * (1 - beta**2)), rtol=1e-4)


def test_weight_decay_uses_the_float32_parameters(batch):
    # 1 + 2**-10 rounds to 1 in bfloat16.
    transform = adamw(**CONSTANT, weight_decay=0.5)
    state = step_of(transform).init({"b": jnp.zeros(1), "w": jnp.full((8, 1), 1 + 2**-10)})
    after, _ = run(batch, state=state, loss=lambda params, batch_BS: 0 * params["w"].sum(), transform=transform)
    np.testing.assert_array_equal(after.params["w"], np.float32(0.75 * (1 + 2**-10)))


# --- Donation ---


@pytest.mark.parametrize("num_microbatches", MICROBATCHES)
def test_every_leaf_of_the_state_is_updated_in_place(batch, num_microbatches):
    assert step_of(adamw(), num_microbatches=num_microbatches).compile(batch)


def test_leaves_of_a_new_state_do_not_share_a_buffer(batch):
    """Donating one buffer twice is an error."""
    state = step_of(adamw()).init(new_params())
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
    assert len(set(pointers)) == len(pointers)


@pytest.mark.parametrize(("stored", "returned"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_an_optimizer_state_returned_in_another_dtype_is_reported_by_leaf(batch, stored, returned):
    def init(params):
        return {"trace": jax.tree.map(lambda p: jnp.zeros(p.shape, stored), params), "calls": jnp.zeros((), jnp.int32)}

    def update(updates, state, params=None):
        trace = jax.tree.map(lambda t, g: (0.9 * t + g).astype(returned), state["trace"], updates)
        return updates, {"trace": trace, "calls": state["calls"] + 1}

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        with pytest.raises(DonationError, match="2 of 7 leaves of the state are not updated in place") as error:
            step_of(optax.GradientTransformation(init, update)).compile(batch)
    assert error.value.leaves == (".opt_state['trace']['b']", ".opt_state['trace']['w']")


# --- With jax_debug_nans ---


@pytest.mark.parametrize("mesh", [False, True], ids=["one device", "mesh"])
def test_debug_nans_reports_a_nan_and_leaves_the_state(mesh):
    def loss(params, batch, key):
        return jnp.mean(jnp.log(batch @ params["w"]))

    params, batch = {"w": jnp.ones((4, 1))}, np.ones((2, 4), np.float32)
    strategy = Replicated(jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]) if mesh else None, params)
    with jax.debug_nans(True):
        step = train_step(loss, optax.adam(0.1), strategy)
        with pytest.warns(UserWarning, match="jax_debug_nans"):
            run = step.compile(batch)
        assert "jax_debug_nans" in str(run)
        state, _ = run(step.init(params), step.place(batch))
        with pytest.raises(NonFiniteError, match="jax_debug_nans") as error:
            run(state, step.place(-batch))
        assert error.value.step == 2
        state, _ = run(state, step.place(batch))
        assert state.step == 2
