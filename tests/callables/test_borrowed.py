"""Handles behave like arrays until their lease ends. Graphed callables and splits have a one-line repr."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgraph
from jgraph.callables._borrowed import Borrowed, Lease
from jgraph.errors import OwnershipError
from tests.callables import chain

ARRAY = jnp.arange(1.0, 7.0).reshape(2, 3)
USES = {
    "function of jax.numpy": jnp.sum,
    "the same handle twice": lambda a: jnp.add(a, a),
    "list with a handle": lambda a: jnp.stack([a, ARRAY]),
    "where": lambda a: jnp.where(a > 2, a, 0),
    "function of numpy": np.linalg.norm,
    "numpy array": np.asarray,
    "sum": lambda a: a + 1,
    "reflected subtraction": lambda a: 1 - a,
    "sum with an array on the left": lambda a: ARRAY + a,
    "sum with a numpy array on the left": lambda a: np.ones((2, 3), np.float32) + a,
    "sum of two handles": lambda a: a + a,
    "matmul": lambda a: a @ ARRAY.T,
    "matmul with an array on the left": lambda a: ARRAY.T @ a,
    "index": lambda a: a[1, :2],
    "indexed update": lambda a: a.at[0].set(0),
    "conversion to float": lambda a: float(a[0, 1]),
    "iteration": lambda a: [row.sum() for row in a],
    "method": lambda a: a.astype(jnp.bfloat16),
    "attribute": lambda a: a.T,
    "comparison": lambda a: a == ARRAY,
    "negation": lambda a: -a,
    "jit": jax.jit(lambda a: a * 2),
    "gradient": jax.grad(lambda a: (a**2).sum()),
}


@pytest.fixture
def lease():
    return Lease("main_grad of callable 0")


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_handle_behaves_like_an_array_until_its_lease_ends(use, lease):
    handle = Borrowed(ARRAY, lease, "w")
    found, expected = use(handle), use(ARRAY)
    assert not isinstance(found, Borrowed)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    lease.ended = "updated in place"
    with pytest.raises(OwnershipError) as error:
        use(handle)
    assert error.value.owner == "main_grad of callable 0"


def test_a_stale_handle_still_reports_its_shape_and_dtype(lease):
    handle = Borrowed(ARRAY, lease, "w")
    lease.ended = "updated in place"
    assert (handle.shape, handle.dtype, handle.ndim, handle.size) == ((2, 3), jnp.float32, 2, 6)
    assert repr(handle) == "Borrowed(main_grad of callable 0, w: float32[2, 3], updated in place)"


def test_the_repr_of_graphed_callables_is_one_line():
    graphed, params = chain.build(2, order=[1, 2, -2, -2.5, -1], delay_wgrad=[False, True])
    assert repr(graphed) == "GraphedCallables(2 callables, Schedule(custom: 1 rank, 2 stages, 1 microbatch, 5 ticks))"
    assert repr(graphed[1]) == "Graphed(1: forward, dgrad, wgrad; float32[3, 4] -> float32[3, 4])"
    graphed[0](params[0], jnp.ones((chain.B, chain.D)))
    assert repr(graphed[0]) == "Graphed(0: forward, backward; float32[3, 4] -> float32[3, 4]; waiting microbatches: 0)"
    graphed.reset()
    assert repr(graphed[0]) == "Graphed(0: reset)"


def test_the_repr_of_a_split_is_one_line():
    assert repr(jgraph.split_backward(chain.stage)) == "Split(stage: every product delayed, recompute='elementwise')"
    split = jgraph.split_backward(jnp.sin, delay="up*", recompute="nothing")
    assert repr(split) == "Split(sin: every product of up* delayed, recompute='nothing')"
