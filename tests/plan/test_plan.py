"""`jgraph.plan`: exact state, refused layouts, the table, what does not fit, and command lines that parse."""

import dataclasses
import shlex

import jax
import jax.numpy as jnp
import pytest

import jgraph
from jgraph.device import DEVICES
from jgraph.errors import ConfigError
from jgraph.kernels.quantize import cast_transpose
from jgraph.plan.__main__ import main
from jgraph.plan._lifetimes import Lifetimes, Stored
from jgraph.plan._memory import Memory, Predictor, State
from jgraph.plan._plan import Option, Plan, _base, layouts
from jgraph.plan._speed import MATMULS, SECONDS_PER_LAYER, Speed, work
from jgraph.train.__main__ import parse
from jgraph.train.config import LoRAConfig, TrainConfig
from jgraph.train.presets import preset
from jgraph.train.setup import TrainSetup
from tests import own
from tests.target_fixture import reused_kernels

TINY = preset("cpu-tiny")
TARGETS = {device.aot: device for device in DEVICES if device.aot}


def small(**changes) -> TrainConfig:
    """A model of a second."""
    return TINY.changed(model=dataclasses.replace(TINY.model, num_layers=4, d_model=64, d_ff=128), **changes)


def placed_bytes(config: TrainConfig) -> int:
    """Bytes of the state on the first device, after it was made."""
    state = TrainSetup.from_config(config).init()
    first = jax.devices()[0]
    shards = [shard for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards if shard.device == first]
    return sum(shard.data.nbytes for shard in shards)


LAYOUTS = {"dp": 2}, {"fsdp": 4}, {"cp": 2, "tp": 2}, {"pp": 2, "fsdp": 2}


@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tp": 2}, *(pytest.param(sizes, marks=pytest.mark.long) for sizes in LAYOUTS)])
def test_the_state_is_that_of_the_initialized_step(sizes):
    config = small(**sizes, num_microbatches=2)
    assert Predictor(TARGETS["h100"]).state(config).total == placed_bytes(config)


def test_layouts_are_all_products_of_the_axes():
    products = list(layouts(TINY, 4))
    # One of five axes has four devices, or two of them have two.
    assert len({tuple(sizes.items()) for sizes in products}) == len(products) == 5 + 10
    assert all(sizes["dp"] * sizes["fsdp"] * sizes["pp"] * sizes["cp"] * sizes["tp"] == 4 for sizes in products)
    assert {sizes["ep"] for sizes in products} == {1}
    assert {"dp": 1, "fsdp": 4, "ep": 4, "pp": 1, "cp": 1, "tp": 1} in list(layouts(preset("gpt-moe-tiny"), 4))


@pytest.fixture(scope="module")
def found():
    return jgraph.plan("cpu-tiny", gpus=2, seq_len=64, batch_size=2)


def test_the_table_lists_what_fits_and_the_fastest_first(found):
    speeds = [option.speed.tokens_per_second for option in found.options]
    assert all(option.fits for option in found.options)
    assert speeds == sorted(speeds, reverse=True)
    text = str(found)
    assert [option.layout in text for option in found.options] == [True] * len(found.options)
    assert text.count("python -m jgraph.train") == len(found.best) == 3


def test_layouts_that_the_model_refuses_are_counted_with_the_reason():
    uneven = small()
    uneven = uneven.changed(model=dataclasses.replace(uneven.model, num_heads=2, num_kv_heads=1))
    planned = jgraph.plan(uneven, gpus=2, batch_size=2)
    (reason,) = planned.refused
    assert reason.startswith("`tp` is 2: must divide")
    assert all(option.config.parallel.tp == 1 for option in planned.options)


def test_a_model_that_does_not_fit_says_on_how_many_gpus_it_may():
    # 70 billion parameters in two layers, which are traced in a second.
    wide = TINY.changed(model=dataclasses.replace(TINY.model, num_layers=2, d_model=32768, d_ff=1_000_000, num_heads=256))
    planned = jgraph.plan(wide, gpus=2, batch_size=2)
    assert planned.best == ()
    assert "does not fit on 2, and not on fewer than " in str(planned)
    assert "the state alone needs " in str(planned)
    assert "python -m jgraph.train" not in str(planned)


def test_the_command_line_of_the_best_is_its_configuration(found):
    best = found.best[0]
    words = shlex.split(best.command)
    config = parse(words[words.index("jgraph.train") + 1 :])
    assert config is not None
    assert (config.parallel, config.input, config.compile) == (best.config.parallel, best.config.input, best.config.compile)
    assert TrainSetup.from_config(config).step.num_devices == 2


def test_lora_has_a_smaller_state_and_its_rank_in_the_command_line():
    full, lora = (jgraph.plan("cpu-tiny", gpus=1, batch_size=1, finetune=kind).best[0] for kind in ("full", "lora"))
    assert lora.memory.state < 0.6 * full.memory.state  # The frozen weights are a third of the state.
    assert "--lora.rank 16" in lora.command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": "gpt-5"}, "`source` is gpt-5: must be a preset"),
        ({"gpu": "tpu"}, "`gpu` is 'tpu'"),
        ({"gpus": 0}, "`gpus` is 0: must be at least 1"),
        ({"gpus": 7, "batch_size": 1}, "`gpus` is 7: no layout is possible"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line(arguments, message):
    with pytest.raises(ConfigError) as error:
        jgraph.plan(**{"source": "cpu-tiny"} | arguments)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.long
@pytest.mark.once
def test_pipelines_with_experts_are_not_predicted():
    planned = jgraph.plan("gpt-moe-tiny", gpus=2)
    assert planned.best
    assert all(option.config.parallel.pp == 1 and min(dataclasses.astuple(option.memory)) >= 0 for option in planned.options)
    assert any("the memory of its pipelines is not predicted" in reason for reason in planned.refused)


def test_the_command_prints_the_table_and_names_flags_in_errors(capsys):
    assert main(["cpu-tiny", "--gpus", "1", "--batch-size", "1"]) == 0
    assert "tokens per step on H100" in capsys.readouterr().out
    assert main(["gpt-5"]) == 2
    assert "error: `PRESET|FOLDER` is gpt-5: must be a preset (cpu-tiny, " in capsys.readouterr().err
    assert main(["cpu-tiny", "--gpus", "0"]) == 2
    assert "--gpus is 0: must be at least 1" in capsys.readouterr().err


def test_the_operand_of_a_kernel_that_quantizes_is_in_memory():
    x_MN = jnp.ones((64, 128), jnp.bfloat16)

    def quantized(x_MN):
        return cast_transpose(jnp.exp(x_MN), jnp.float32(1))

    closed = jax.make_jaxpr(quantized)(x_MN)
    found = Lifetimes.of(closed, [True], params=frozenset(), length=7, attention="cudnn")
    # The kernel reads exp(x) in bfloat16 and writes two arrays in FP8. XLA's fusion would read x.
    assert sum(array.nbytes for array in found.arrays if array.shape in ((64, 128), (128, 64))) == 64 * 128 * (2 + 1 + 1)


def test_late_gathers_begin_when_they_are_read():
    found = Lifetimes(frozenset(), 7, "cudnn", time=6)
    found.arrays = [Stored((8,), 8, "activation", 1, 2), Stored((4,), 4, "weight", 1, 5, read=4)]
    early, late = (found.peaks(lambda array: array.nbytes, gathers=when)[1] for when in ("early", "late"))
    assert (sum(early.values()), sum(late.values())) == (12, 8)


def test_the_time_of_frozen_weights_is_that_of_two_matmuls_and_recomputation_adds_one():
    config = preset("llama3-8b").changed(seq_len=1024, batch_size=64)
    state = State(0, 0)

    def seconds(**changes):
        return work(config.changed(**changes), TARGETS["h200"], state, 8_000_000_000)

    lora = {"lora": LoRAConfig(rank=16)}
    full, frozen, again = seconds(), seconds(**lora), seconds(**lora, remat="layer")
    assert frozen / full == pytest.approx(2 / 3, abs=0.04)
    assert again / full == pytest.approx(1, abs=0.04)


def test_a_small_model_takes_the_time_to_start_its_kernels():
    config = preset("launch-bound")
    state = State(0, 0)
    one, eight = (work(config.changed(batch_size=8, num_microbatches=n), TARGETS["h200"], state, 10**7) for n in (1, 8))
    assert one > SECONDS_PER_LAYER * config.model.num_layers
    assert eight - one == pytest.approx(7 * SECONDS_PER_LAYER * config.model.num_layers)


def test_collectives_in_flight_are_no_larger_than_what_is_transferred():
    memory = Predictor(TARGETS["h200"]).memory(small(fsdp=2, batch_size=2))
    assert 0 < memory.buffers <= memory.gathered + memory.gradients + memory.activations


@pytest.mark.long
@pytest.mark.target
@pytest.mark.parametrize("changes", [{}, {"remat": "layer"}])
def test_the_peak_is_that_of_xla_for_a_gpu_that_is_not_present(h200, changes):
    config = preset("gpt-124m").changed(seq_len=64, batch_size=64, **changes)
    config = config.changed(model=dataclasses.replace(config.model, num_layers=5, attention="xla"))
    setup = TrainSetup.from_config(config)
    options = setup.options("gpu") | reused_kernels()
    report = jgraph.explain(setup.step.jitted(), setup.step.state, setup.batch(), target="h200", compiler_options=options)
    assert report.memory is not None
    assert Predictor(TARGETS["h200"], "xla").memory(config).peak == pytest.approx(report.memory.total, rel=0.04)


def test_the_peak_of_a_loop_is_that_of_its_body():
    up, down, x_MN = jnp.ones((128, 512)), jnp.ones((512, 128)), jnp.ones((64, 128))

    def body(x_MN, _):
        for _ in range(2):
            x_MN = jnp.tanh(x_MN @ up) @ down
        return x_MN, None

    closed = jax.make_jaxpr(lambda x_MN: jax.lax.scan(body, x_MN, length=3)[0])(x_MN)
    found = Lifetimes.of(closed, [True], params=frozenset(), length=7, attention="cudnn")
    # The matmul writes an array, and its tanh is the operand of the next one. Those of the first half are gone.
    wide = [array for array in found.arrays if array.shape == (64, 512)]
    assert [array.nbytes for array in wide] == 2 * [64 * 512 * 4]
    assert all(array.first == array.last for array in wide)


@pytest.mark.parametrize(("rank", "expected"), [(0, 16), (4, 4)])
def test_adapters_have_the_rank_of_the_configuration_or_else_16(rank, expected):
    assert _base(TINY.changed(lora=LoRAConfig(rank=rank)), None, "lora").lora.rank == expected


def option(*, fits: bool, state: float = 1.0) -> Option:
    return Option(TINY, Memory(state, 0, 0, 0, 0), Speed(1, 0, 0, 1), fits, "python -m jgraph.train")


def plan_of(*options: Option, **refused: int) -> str:
    return str(Plan("name", "h100", 2, 1, 1, 100.0, options, refused))


def test_the_table_counts_what_it_does_not_show():
    lines = plan_of(*15 * [option(fits=True)], *2 * [option(fits=False)], often=3, rare=1).splitlines()
    assert sum(line.startswith("one GPU ") for line in lines) == 12
    assert lines[14:18] == [
        "and 3 slower layouts that fit",
        "2 other layouts do not fit",
        "refused in 3 layouts: often",
        "refused: rare",
    ]


def test_a_model_that_no_number_of_gpus_holds_is_refused_with_the_largest_number():
    assert "does not fit on 2, and not on fewer than 131072: " in plan_of(option(fits=False, state=1e9))


def test_a_model_without_a_count_of_flops_takes_six_per_parameter_and_token():
    config = TrainConfig.from_fields(module="tests.own:Normed", model=own.Settings(), batch_size=8, seq_len=16)
    one, two = (work(config, TARGETS["h200"], State(0, 0), count * 10**9) for count in (1, 2))
    assert two - one == pytest.approx(6e9 * 8 * 16 / (TARGETS["h200"].product_flops_per_second * MATMULS))
