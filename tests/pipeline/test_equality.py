"""Loss and gradients of every schedule equal those of the model on one device, up to float32 rounding.

The bound is 1e-6 of the largest gradient; found were at most 2e-7. Sums over microbatches are in another order than the
reference's, which is in float64.
"""

from functools import reduce

import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.pipeline import PipelineModel
from jgraph.schedule import Order, Schedule, generate, read, write
from tests.autodiff.stages import grouped_mlp, grouped_params
from tests.pipeline import model
from tests.schedule.strategies import delayed_ticks, random_schedule, to_csv

pytestmark = pytest.mark.long

# (ranks, chunks, microbatches). Each schedule with ranks in the middle and a steady state; one rank, and no steady state, of
# every kind: one chunk and several, whole backwards and split ones. Slots of every size are for tests of the tables.
ALIGNED = [(1, 1, 4), (2, 1, 2), (2, 2, 7), (4, 1, 13)]
GENERAL = {
    "aligned": [(1, 1, 1), (2, 2, 7)],
    "1f1b": [(1, 1, 4), (4, 1, 13)],
    "interleaved-1f1b": [(1, 2, 1), (4, 2, 13)],
    "zb-h1": [(2, 1, 2), (4, 1, 13)],
    "zb-h2": [(4, 1, 13)],
    "zb-v": [(2, 2, 2), (4, 2, 13)],
    "dualpipe-v": [(4, 2, 13)],
    "gpipe": [(4, 2, 4)],
}
GRID = [("aligned", *sizes, "aligned") for sizes in ALIGNED]
GRID += [(name, *sizes, "general") for name, rows in GENERAL.items() for sizes in rows]
DISPATCHED = [
    *(("aligned", 3, 2, 4), ("1f1b", 3, 1, 5), ("zb-h1", 3, 1, 5)),
    *(("zb-v", 2, 2, 5), ("dualpipe-v", 2, 2, 7)),
]


@pytest.mark.once
@pytest.mark.parametrize(("name", "P", "C", "M", "runtime"), GRID)
def test_loss_and_gradients_are_those_of_one_device(name, P, C, M, runtime):
    schedule = generate(name, pp=P, microbatches=M, chunks=C)
    pipe = model.pipeline(schedule, P * C, runtime=runtime)
    model.assert_same(model.piped(pipe), model.expected(P * C, M))


@pytest.mark.once
@pytest.mark.parametrize(("name", "P", "C", "M"), DISPATCHED)
def test_those_of_executables_that_the_host_hands_over_are_too(name, P, C, M):
    pipe = model.pipeline(generate(name, pp=P, microbatches=M, chunks=C), P * C)
    model.assert_same(model.played(pipe), model.expected(P * C, M))


@pytest.mark.once
@pytest.mark.parametrize(
    ("P", "C", "M", "runtime"),
    [(4, 1, 3, "aligned"), (3, 2, 1, "aligned"), (2, 3, 3, "aligned"), (3, 2, 1, "general")],
)
def test_fewer_microbatches_than_ranks_and_more_chunks_are_right_too(P, C, M, runtime):
    pipe = model.pipeline(generate("aligned", pp=P, microbatches=M, chunks=C), P * C, runtime=runtime)
    model.assert_same(model.piped(pipe), model.expected(P * C, M))


@pytest.mark.once
@pytest.mark.parametrize("runtime", ["aligned", "general"])
def test_a_rank_that_waits_while_others_do_dgrads_adds_nothing(runtime):
    order = Order.parse([1, 1, -1, -1, -1.5, -1.5])
    # In tick 4 the first rank has a gradient to go on with, and waits.
    schedule = Schedule((order, order), ticks=(np.array([0, 1, 5, 6, 7, 8]), np.array([1, 2, 3, 4, 7, 8])))
    model.assert_same(model.piped(model.pipeline(schedule, 2, runtime=runtime)), model.expected(2, 2))


@pytest.mark.once
def test_seven_layers_on_six_stages_are_right():
    pipe = model.pipeline(generate("aligned", pp=3, microbatches=4, chunks=2), 7, runtime="aligned")
    assert not pipe.layout.is_even
    model.assert_same(model.piped(pipe), model.expected(7, 4))


@pytest.mark.parametrize(
    ("name", "C", "L", "runtime", "remat"),
    [
        ("aligned", 1, 2, "aligned", "nothing"),
        pytest.param("zb-v", 2, 5, "general", "nothing", marks=pytest.mark.once),
        ("1f1b", 1, 5, "general", "layer"),
    ],
)
def test_dropout_in_backward_is_that_of_forward(name, C, L, runtime, remat):
    pipe = model.pipeline(generate(name, pp=2, microbatches=4, chunks=C), L, runtime=runtime, remat=remat)
    model.assert_same(model.piped(pipe, dropout=5), model.expected(L, 4, dropout=5))


@pytest.mark.once
def test_two_keys_give_different_losses():
    pipe = model.pipeline(generate("1f1b", pp=2, microbatches=2), 2)
    (one, _), (other, _), (none, _) = (model.piped(pipe, dropout=seed) for seed in (5, 6, None))
    assert len({float(one), float(other), float(none)}) == 3


@pytest.mark.once
@pytest.mark.parametrize(("name", "C", "runtime"), [("aligned", 1, "aligned"), ("zb-v", 2, "general")])
def test_a_layer_made_again_in_its_backward_gives_the_same_gradients(name, C, runtime):
    pipe = model.pipeline(generate(name, pp=2, microbatches=4, chunks=C), 4, runtime=runtime, remat="layer")
    model.assert_same(model.piped(pipe), model.expected(4, 4))


@pytest.mark.once
@pytest.mark.parametrize(("name", "dp", "P"), [("aligned", 2, 2), ("1f1b", 2, 1)])
def test_data_ranks_share_a_microbatch_and_drop_out_each_on_its_own(name, dp, P):
    pipe = model.pipeline(generate(name, pp=P, microbatches=4), P, dp=dp)
    model.assert_same(model.piped(pipe, dropout=5), model.expected(P, 4, dp, dropout=5))


def users_schedule(seed: int) -> Schedule:
    """A random one with pauses, on several ranks with equal numbers of stages."""
    rng = np.random.default_rng(seed)
    while True:
        schedule = delayed_ticks(rng, random_schedule(rng, most_ranks=3))
        if schedule.num_ranks > 1 and len(set(map(len, schedule.placement))) == 1:
            return schedule


@pytest.mark.once
@pytest.mark.parametrize("seed", [1])
def test_a_schedule_from_a_users_csv_is_played(seed, tmp_path):
    (tmp_path / "own.csv").write_text(to_csv(users_schedule(seed)))
    schedule = read(tmp_path / "own.csv")
    pipe = model.pipeline(schedule, schedule.num_stages, runtime="general")
    model.assert_same(model.piped(pipe), model.expected(schedule.num_stages, schedule.num_microbatches))
    model.assert_same(model.played(pipe), model.expected(schedule.num_stages, schedule.num_microbatches))


@pytest.mark.once
@pytest.mark.parametrize("seed", [5])
def test_a_schedule_from_a_users_json_is_played(seed, tmp_path):
    # Signed numbers cannot say that a chunk has both whole and split backwards.
    write(users_schedule(seed).split(), tmp_path / "own.json")
    schedule = read(tmp_path / "own.json")
    pipe = model.pipeline(schedule, schedule.num_stages, runtime="general")
    model.assert_same(model.piped(pipe), model.expected(schedule.num_stages, schedule.num_microbatches))


def routed_layer(p, x):
    return 0.9 * x + grouped_mlp(p, jnp.tanh(x))


def routed_loss(outer, layers, inputs, key):
    return model.head(outer, reduce(lambda x, p: routed_layer(p, x), layers, model.embed(outer, inputs)), inputs)


@pytest.mark.parametrize(("name", "runtime", "remat"), [("aligned", "aligned", "nothing"), ("zb-h1", "general", "layer")])
def test_layers_with_experts_give_the_gradients_of_one_device(name, runtime, remat):
    given = model.params(2)[0], [grouped_params(seed=3 * i, width=model.D) for i in range(2)]
    parts = PipelineModel(model.embed, routed_layer, model.head)
    pipe = model.pipeline(generate(name, pp=2, microbatches=3), 2, parts=parts, runtime=runtime, remat=remat)
    model.assert_same(model.piped(pipe, given=given), model.plain(*given, model.batch(3), loss=routed_loss))
