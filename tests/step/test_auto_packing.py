"""Tests that `train_step` packs small parameters if it can prove that the transform is elementwise, and only then."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import jgraph
from jgraph.schedule import generate
from jgraph.train._optimizer_config import OPTIMIZERS
from jgraph.tree import leaf_names
from tests.pipeline import test_pipelined_step as pipelined
from tests.step.test_elementwise import COUPLED, ELEMENTWISE, SHAPES

PACKED = "updates packed parameters, because the transform is elementwise"
TREE = "updates the model's own tree, because the transform "
STEPS = 4

LAYERS = {"kernel": (6, 6), "bias": (6,), "wide": (6, 5)}
X = jax.random.normal(jax.random.key(1), (8, 6))


def parameters(layers=2):
    keys = iter(jax.random.split(jax.random.key(0), 100))
    return [{name: jax.random.normal(next(keys), shape) for name, shape in LAYERS.items()} for _ in range(layers)]


def loss(params, x, key):
    for layer in params:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
        x = jnp.tanh(x @ layer["wide"]) @ layer["wide"].T
    return jnp.mean(jnp.square(x - 0.3))


def one_device(params):
    return jgraph.Replicated(None, params)


def step_with(transform, shapes=SHAPES, **options):
    return jgraph.train_step(lambda params, batch, key: jnp.float32(0), transform, one_device(shapes), **options)


def choice(transform, shapes=SHAPES, **options):
    return step_with(transform, shapes, **options).update.optimizer.about


def trained(step, params, steps=STEPS):
    run, state = step.compile(X), step.init(params)
    for _ in range(steps):
        state, _ = run(state, step.place(X))
    return state


def by_hand(transform, params, steps=STEPS):
    """Returns parameters and state after steps of optax with `jax.grad`, each parameter in its own array."""
    transform, state = optax.with_extra_args_support(transform), transform.init(params)

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params, X, None)
        updates, state = transform.update(grads, state, params, value=value, grad=grads)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
    return params, state


def assert_equals_optax(transform, params, step):
    found = step.canonical.of(trained(step, params))
    expected = by_hand(transform, params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), (found.params, found.opt_state), expected)


# --- The choice ---


@pytest.mark.parametrize("name", [name for name, transform in ELEMENTWISE.items() if hasattr(transform, "init")])
def test_an_elementwise_transform_updates_packed_parameters(name):
    assert choice(ELEMENTWISE[name]) == PACKED


@pytest.mark.parametrize("name", [name for name, transform in COUPLED.items() if hasattr(transform, "init")])
def test_any_other_transform_updates_the_tree(name):
    assert choice(COUPLED[name]).startswith(TREE)


def constructor(name):
    return getattr(optax, name, None) or getattr(contrib, name)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_the_command_line_of_elements_update_packed_parameters(name):
    assert (choice(constructor(name)(0.01), parameters()) == PACKED) == (OPTIMIZERS[name].updates == "elements")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name != "adamw")) for name in OPTIMIZERS])
def test_optimizers_of_the_command_line_equal_plain_optax(name):
    transform, params = constructor(name)(0.01), parameters()
    assert_equals_optax(transform, params, jgraph.train_step(loss, transform, one_device(params)))


def everywhere(label):
    return lambda params: jax.tree.map(lambda leaf: label, params)


def by_rank(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


OTHERS = {
    "one transform of several": (optax.partition({"a": optax.adam(0.01), "b": optax.sgd(1.0)}, everywhere("a")), True),
    "an unused transform": (optax.partition({"a": optax.sgd(0.1), "b": optax.adam(0.01)}, everywhere("a")), False),
    "transforms by rank": (optax.partition({True: optax.adam(0.01), False: optax.sgd(0.1)}, by_rank), False),
    "masked everywhere": (optax.masked(optax.adam(0.01), everywhere(True)), True),
    "masked by rank": (optax.masked(optax.adam(0.01), by_rank), False),
    "accumulation": (optax.MultiSteps(optax.adam(0.01), 2), True),
    "a rate in the state": (optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(0.01, 0.02, 3)), True),
    "schedule-free": (contrib.schedule_free_adamw(0.01), True),
    "muon": (contrib.muon(0.01), False),
    "accumulation for muon": (optax.MultiSteps(contrib.muon(0.01), 2), False),
    "l-bfgs": (optax.lbfgs(0.01, linesearch=None), False),
    "a rate from a table": (optax.sgd(optax.piecewise_interpolate_schedule("linear", 0.1, {2: 0.5, 4: 0.1})), True),
    "decay of vectors": (optax.adamw(0.01, weight_decay=0.3), True),
    "decay masked by rank": (optax.adamw(0.01, weight_decay=0.3, mask=by_rank), False),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in ("accumulation for muon", "l-bfgs"))) for name in OTHERS]
)
def test_wrapped_transforms_equal_plain_optax(name):
    transform, packs = OTHERS[name]
    params = parameters()
    step = jgraph.train_step(loss, transform, one_device(params))
    assert (step.update.optimizer.about == PACKED) == packs
    if isinstance(transform, optax.MultiSteps):
        transform = transform.gradient_transformation()
    assert_equals_optax(transform, params, step)


# --- Traps ---


def shapes_of(*shapes):
    return {f"p{i}": jax.ShapeDtypeStruct(shape, jnp.float32) for i, shape in enumerate(shapes)}


def scaled(factor):
    """Returns a transform that multiplies the gradient of each leaf by a factor of its position, the leaf and the count."""

    def update(grads, params):
        leaves, structure = jax.tree.flatten(grads)
        return structure.unflatten([leaf * factor(i, leaf, len(leaves)) for i, leaf in enumerate(leaves)])

    return optax.stateless(update)


MANY = {f"layer{i:02}": shapes_of((64, 64), (64,), (64, 32), (64,)) for i in range(20)}  # more leaves than are traced

FACTORS = {
    "the rank": lambda i, leaf, count: leaf.ndim,
    "a large size": lambda i, leaf, count: 2.0 if leaf.size > 64 * 64 else 1.0,
    "one shape": lambda i, leaf, count: 2.0 if leaf.shape == (64, 32) else 1.0,
    "the number of elements, traced": lambda i, leaf, count: 1 / jnp.sum(jnp.ones(leaf.shape)),
    "the number of leaves": lambda i, leaf, count: 1 / count,
    "the position": lambda i, leaf, count: 1.0 if i < 12 else 0.5,
    "the place of an element": lambda i, leaf, count: jnp.arange(leaf.size).reshape(leaf.shape),
    "the norm of the gradient": lambda i, leaf, count: 1 / jnp.linalg.norm(leaf),
    "the largest element": lambda i, leaf, count: jax.lax.cummax(leaf, axis=0),
    "another place": lambda i, leaf, count: jnp.flip(leaf),
    "random numbers": lambda i, leaf, count: jax.random.normal(jax.random.key(0), leaf.shape),
}


@pytest.mark.parametrize("name", FACTORS)
def test_a_factor_that_differs_between_layouts_takes_the_tree(name):
    assert choice(scaled(FACTORS[name]), MANY).startswith(TREE)


def test_a_uniform_factor_is_packed():
    assert choice(scaled(lambda i, leaf, count: jnp.sum(jnp.ones(3))), MANY) == PACKED


def test_square_matrices_alone_do_not_hide_a_matmul():
    transform = optax.stateless(lambda grads, params: jax.tree.map(lambda g: g @ g if g.ndim == 2 else g, grads))
    assert choice(transform, shapes_of((8, 8), (8, 8))).startswith(TREE)
    assert choice(optax.stateless(lambda g, p: jax.tree.map(lambda g: g.T, g)), shapes_of((8, 8), (8, 8))).startswith(TREE)


NAMES = {
    "a path": lambda params: jax.tree_util.tree_map_with_path(lambda path, _: "layer19" not in str(path), params),
    "a path by jax.tree": lambda params: jax.tree.map_with_path(lambda path, _: "layer19" not in str(path), params),
    "leaves with paths": lambda params: jax.tree.unflatten(
        jax.tree.structure(params), ["layer19" not in name for name in leaf_names(params)]
    ),
    "a key": lambda params: {name: not name.endswith("19") for name in params},
    "a key of a dict only": lambda params: jax.tree.map(
        lambda _: not (isinstance(params, dict) and "layer19" in params), params
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_mask_by_name_takes_the_tree(name):
    assert choice(optax.adamw(1e-3, mask=NAMES[name]), MANY) == f"{TREE}reads the names of parameters"


def test_names_that_jax_reads_for_its_messages_do_not_count():
    def update(grads, state, params=None):
        def scale(tree):
            return jax.tree.map(lambda leaf: 2 * leaf, tree)

        return jax.lax.cond(state > 3, jax.jit(scale), lambda tree: tree, grads), state + 1

    assert choice(optax.GradientTransformation(lambda params: jnp.zeros(()), update), MANY) == PACKED


def delayed_by_rank():
    """The first update is the same for all ranks, and later ones are not."""

    def update(grads, state, params=None):
        return state, jax.tree.map(lambda grad: grad * grad.ndim, grads)

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def two_counters():
    """The matrices read another counter than the vectors. Both start at zero."""

    def update(grads, state, params=None):
        a, b = state
        return jax.tree.map(lambda grad: grad * (a if grad.ndim > 1 else b), grads), (a + 1, b + 2)

    return optax.GradientTransformation(lambda params: (jnp.zeros(()), jnp.zeros(())), update)


def start_by_rank():
    update = lambda grads, state, params=None: (state, state)  # noqa: E731
    return optax.GradientTransformation(lambda params: jax.tree.map(lambda leaf: leaf * leaf.ndim, params), update)


def neighbors():
    def update(grads, params):
        leaves, structure = jax.tree.flatten(grads)
        same = [[other for other in leaves if other.shape == leaf.shape][-1] for leaf in leaves]
        return structure.unflatten(same)

    return optax.stateless(update)


def count_per_leaf():
    init = lambda params: jax.tree.map(lambda leaf: jnp.zeros(()), params)  # noqa: E731
    return optax.GradientTransformation(init, lambda grads, state, params=None: (grads, jax.tree.map(lambda n: n + 1, state)))


def printing():
    def update(grads, params):
        jax.debug.print("{}", jax.tree.leaves(grads)[0])
        return grads

    return optax.stateless(update)


def search():
    return optax.lbfgs(0.1)  # its line search calls the loss


@pytest.mark.parametrize("make", [delayed_by_rank, two_counters, start_by_rank, neighbors, count_per_leaf, printing, search])
def test_a_failed_proof_takes_the_tree_and_does_not_raise(make):
    assert choice(make(), MANY).startswith(TREE)


def test_shapes_that_only_the_arrays_of_a_strategy_have_are_checked():
    transform = scaled(lambda i, leaf, count: 2.0 if leaf.ndim > 2 else 1.0)
    assert choice(transform, pipelined.shapes()) == PACKED
    # Stacked layers have an axis more than any parameter.
    mesh = jax.make_mesh((2, 2), ("pipe", "fsdp"))
    strategy = jgraph.Pipelined(mesh, pipelined.shapes(), generate("1f1b", pp=2, microbatches=4))
    step = jgraph.train_step(pipelined.MODEL, transform, strategy, num_microbatches=4)
    assert step.update.optimizer.about.startswith(TREE)
    step = jgraph.train_step(pipelined.MODEL, optax.adam(0.1), strategy, num_microbatches=4)
    assert step.update.optimizer.about == PACKED


# --- The step ---


def test_the_step_is_that_of_the_declared_transform():
    params, transform = parameters(), optax.adamw(0.01, weight_decay=0.1)
    plain, declared = (
        jgraph.train_step(loss, each, one_device(params), clip_norm=1.0) for each in (transform, jgraph.elementwise(transform))
    )
    assert plain.lower(X).as_text() == declared.lower(X).as_text()
    jax.tree.map(np.testing.assert_array_equal, trained(plain, params), trained(declared, params))


@pytest.mark.parametrize(("axis", "kind"), [("data", jgraph.Replicated), ("fsdp", jgraph.FullySharded)])
def test_a_plain_transform_is_packed_on_several_devices(axis, kind):
    # Without Adam, which amplifies the rounding of small gradients.
    params, transform = parameters(), optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9))
    step = jgraph.train_step(loss, transform, kind(jax.make_mesh((4,), (axis,)), params))
    assert step.update.optimizer.about == PACKED
    assert_equals_optax(transform, params, step)


def test_the_report_names_the_choice_and_the_reason():
    params = parameters()

    def report(transform, **options):
        return str(jgraph.train_step(loss, transform, one_device(params), **options).compile(X)).splitlines()

    assert f"optimizer: {PACKED}" in report(optax.adam(0.1))
    assert "optimizer: updates packed parameters, because the transform is declared elementwise" in report(
        jgraph.elementwise(optax.adam(0.1))
    )
    assert f"optimizer: {TREE}mixes elements" in report(optax.lamb(0.1))
    assert "optimizer: updates the model's own tree, because `layout` is tree" in report(optax.adam(0.1), layout="tree")


def test_the_tree_can_be_asked_for():
    params, transform = parameters(), optax.adam(0.01)
    step = jgraph.train_step(loss, transform, one_device(params), layout="tree")
    assert jax.tree.structure(step.state.opt_state) == jax.tree.structure(transform.init(params))
    assert_equals_optax(transform, params, step)


@pytest.mark.parametrize(("transform", "layout"), [(optax.adam(0.1), "packed"), (jgraph.elementwise(optax.adam(0.1)), "tree")])
def test_a_layout_that_does_not_fit_is_refused(transform, layout):
    with pytest.raises(jgraph.ConfigError, match=r"`layout` is \S+: must be") as error:
        step_with(transform, layout=layout)
    assert error.value.field == "layout"


@pytest.mark.parametrize("layout", ["auto", "tree"])
def test_moments_are_found_by_the_names_of_parameters(layout):
    params = parameters()
    step = jgraph.train_step(loss, optax.adam(0.01), one_device(params), layout=layout, freeze=("1/*",))
    found = step.canonical.of(trained(step, params, steps=1)).opt_state[0].mu
    grads = jax.grad(loss)(params, X, None)
    np.testing.assert_allclose(found[0]["kernel"], 0.1 * grads[0]["kernel"], rtol=1e-5, atol=1e-6)
    assert found[1] == dict.fromkeys(LAYERS)


def test_a_proof_traces_the_transform_a_fixed_number_of_times():
    calls = []

    def counted(transform):
        def init(params):
            calls.append(("init", len(jax.tree.leaves(params))))
            return transform.init(params)

        def update(*args):
            calls.append(("update", len(jax.tree.leaves(args[0]))))
            return transform.update(*args)

        return optax.GradientTransformation(init, update)

    counts = {}
    for layers in (20, 175):
        calls.clear()
        shapes = {f"layer{i:03}": MANY["layer00"] for i in range(layers)}
        assert choice(counted(optax.adamw(1e-3)), shapes) == PACKED
        counts[layers] = [name for name, _ in calls]
        assert max(leaves for _, leaves in calls) <= 20
    assert counts[20] == counts[175] == ["init", "init", "update"] * 2
