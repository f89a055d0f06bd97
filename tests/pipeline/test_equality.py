"""The loss and gradients of every schedule equal the model on one device, up to float32 rounding.

The tolerance is 1e-6 of the largest gradient. The largest measured error is 2e-7. The reference sums microbatches in float64
and in another order.
"""

from functools import reduce

import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.layout import named
from jgraph.pipeline import Pipeline, PipelineModel
from jgraph.schedule import Order, Schedule, generate, read, write
from tests.autodiff.stages import grouped_mlp, grouped_params
from tests.pipeline import model
from tests.schedule.strategies import delayed_ticks, random_schedule, to_csv

pytestmark = pytest.mark.long

# (ranks, chunks, microbatches). Every schedule is tested with inner ranks and a steady state. One rank, and schedules without a
# steady state, are tested with one and several chunks, and with whole and split backwards. test_tables.py covers more sizes.
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
def test_loss_and_gradients_equal_one_device(name, P, C, M, runtime):
    schedule = generate(name, pp=P, microbatches=M, chunks=C)
    pipe = model.pipeline(schedule, P * C, runtime=runtime)
    model.assert_same(model.run_pipeline(pipe), model.expected(P * C, M))


@pytest.mark.once
@pytest.mark.parametrize(("name", "P", "C", "M"), DISPATCHED)
def test_loss_and_gradients_of_the_dispatch_engine_equal_one_device(name, P, C, M):
    pipe = model.pipeline(generate(name, pp=P, microbatches=M, chunks=C), P * C)
    model.assert_same(model.run_dispatched(pipe), model.expected(P * C, M))


@pytest.mark.once
@pytest.mark.parametrize(
    ("P", "C", "M", "runtime"),
    [(4, 1, 3, "aligned"), (3, 2, 1, "aligned"), (2, 3, 3, "aligned"), (3, 2, 1, "general")],
)
def test_few_microbatches_and_many_chunks_equal_one_device(P, C, M, runtime):
    pipe = model.pipeline(generate("aligned", pp=P, microbatches=M, chunks=C), P * C, runtime=runtime)
    model.assert_same(model.run_pipeline(pipe), model.expected(P * C, M))


@pytest.mark.once
@pytest.mark.parametrize("runtime", ["aligned", "general"])
def test_an_idle_rank_does_not_contribute_to_the_gradients(runtime):
    order = Order.parse([1, 1, -1, -1, -1.5, -1.5])
    # In tick 4 the first rank is idle, although its next gradient is available.
    schedule = Schedule((order, order), ticks=(np.array([0, 1, 5, 6, 7, 8]), np.array([1, 2, 3, 4, 7, 8])))
    model.assert_same(model.run_pipeline(model.pipeline(schedule, 2, runtime=runtime)), model.expected(2, 2))


@pytest.mark.once
def test_seven_layers_on_six_stages_equal_one_device():
    pipe = model.pipeline(generate("aligned", pp=3, microbatches=4, chunks=2), 7, runtime="aligned")
    assert not pipe.assignment.is_even
    model.assert_same(model.run_pipeline(pipe), model.expected(7, 4))


@pytest.mark.parametrize(
    ("name", "C", "L", "runtime", "remat"),
    [
        ("aligned", 1, 2, "aligned", "nothing"),
        pytest.param("zb-v", 2, 5, "general", "nothing", marks=pytest.mark.once),
        ("1f1b", 1, 5, "general", "layer"),
    ],
)
def test_backward_uses_the_dropout_mask_of_forward(name, C, L, runtime, remat):
    pipe = model.pipeline(generate(name, pp=2, microbatches=4, chunks=C), L, runtime=runtime, remat=remat)
    model.assert_same(model.run_pipeline(pipe, dropout=5), model.expected(L, 4, dropout=5))


@pytest.mark.once
def test_different_keys_give_different_losses():
    pipe = model.pipeline(generate("1f1b", pp=2, microbatches=2), 2)
    (one, _), (other, _), (none, _) = (model.run_pipeline(pipe, dropout=seed) for seed in (5, 6, None))
    assert len({float(one), float(other), float(none)}) == 3


@pytest.mark.once
@pytest.mark.parametrize(("name", "C", "runtime"), [("aligned", 1, "aligned"), ("zb-v", 2, "general")])
def test_recomputed_layers_have_the_same_gradients(name, C, runtime):
    pipe = model.pipeline(generate(name, pp=2, microbatches=4, chunks=C), 4, runtime=runtime, remat="layer")
    model.assert_same(model.run_pipeline(pipe), model.expected(4, 4))


@pytest.mark.once
@pytest.mark.parametrize(("name", "dp", "P"), [("aligned", 2, 2), ("1f1b", 2, 1)])
def test_data_ranks_split_a_microbatch_and_draw_different_dropout_masks(name, dp, P):
    pipe = model.pipeline(generate(name, pp=P, microbatches=4), P, dp=dp)
    model.assert_same(model.run_pipeline(pipe, dropout=5), model.expected(P, 4, dp, dropout=5))


def schedule_with_idle_ticks(seed: int) -> Schedule:
    """Returns a random schedule with idle ticks, on several ranks with equal numbers of stages."""
    rng = np.random.default_rng(seed)
    while True:
        schedule = delayed_ticks(rng, random_schedule(rng, most_ranks=3))
        if schedule.num_ranks > 1 and len(set(map(len, schedule.placement))) == 1:
            return schedule


@pytest.mark.once
@pytest.mark.parametrize("seed", [1])
def test_a_schedule_from_a_csv_file_equals_one_device(seed, tmp_path):
    (tmp_path / "own.csv").write_text(to_csv(schedule_with_idle_ticks(seed)))
    schedule = read(tmp_path / "own.csv")
    pipe = model.pipeline(schedule, schedule.num_stages, runtime="general")
    model.assert_same(model.run_pipeline(pipe), model.expected(schedule.num_stages, schedule.num_microbatches))
    model.assert_same(model.run_dispatched(pipe), model.expected(schedule.num_stages, schedule.num_microbatches))


@pytest.mark.once
@pytest.mark.parametrize("seed", [5])
def test_a_schedule_from_a_json_file_equals_one_device(seed, tmp_path):
    # Orders of signed numbers cannot mix whole and split backwards of one chunk.
    write(schedule_with_idle_ticks(seed).split(), tmp_path / "own.json")
    schedule = read(tmp_path / "own.json")
    pipe = model.pipeline(schedule, schedule.num_stages, runtime="general")
    model.assert_same(model.run_pipeline(pipe), model.expected(schedule.num_stages, schedule.num_microbatches))


def routed_layer(p, x):
    return 0.9 * x + grouped_mlp(p, jnp.tanh(x))


def routed_loss(outer, layers, inputs, key):
    return model.head(outer, reduce(lambda x, p: routed_layer(p, x), layers, model.embed(outer, inputs)), inputs)


@pytest.mark.parametrize(("name", "runtime", "remat"), [("aligned", "aligned", "nothing"), ("zb-h1", "general", "layer")])
def test_layers_with_experts_have_the_gradients_of_one_device(name, runtime, remat):
    given = model.params(2)[0], [grouped_params(seed=3 * i, width=model.D) for i in range(2)]
    parts = PipelineModel(model.embed, routed_layer, model.head)
    choices = {"runtime": runtime, "remat": remat}
    pipe = Pipeline.build(parts, generate(name, pp=2, microbatches=3), model.mesh(2), named(given), **choices)
    model.assert_same(model.run_pipeline(pipe, given=given), model.one_device(*given, model.batch(3), loss=routed_loss))
