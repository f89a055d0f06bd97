"""A run with an axis that is `auto`: devices and microbatches of every start, and losses after a restart on fewer devices."""

import json

import jax
import numpy as np
import pytest

from jgraph.errors import ConfigError
from jgraph.moe.config import MoEConfig
from jgraph.train._elastic import placed
from jgraph.train.config import TrainConfig
from jgraph.train.rundir import RunDir
from jgraph_models.gpt_config import GPTConfig
from tests import tiny

CORPUS = {"name": "text", "fingerprint": "0" * 64, "train_tokens": 9, "heldout_tokens": 1}


def config_with(**fields) -> TrainConfig:
    return TrainConfig.from_fields(**{"batch_size": 48, "fsdp": "auto"} | fields)


@pytest.mark.parametrize(
    ("fields", "available", "most", "sizes", "microbatches"),
    [
        # A new run keeps its microbatches.
        ({}, 8, None, {"fsdp": 8}, 1),
        ({"num_microbatches": 2}, 8, None, {"fsdp": 8}, 2),
        ({"tp": 2, "dp": 2}, 8, None, {"dp": 2, "fsdp": 2, "tp": 2}, 1),
        ({"dp": "auto", "fsdp": 2, "pp": 2}, 8, None, {"dp": 2, "fsdp": 2, "pp": 2}, 1),
        ({}, 1, None, {"fsdp": 1}, 1),
        # Resumed on fewer devices, after a start with 6 sequences per device. On 3 devices, 4 is the largest share that fits.
        ({}, 4, 6, {"fsdp": 4}, 2),
        ({}, 3, 6, {"fsdp": 3}, 4),
        ({}, 1, 6, {"fsdp": 1}, 8),
        ({"num_microbatches": 2}, 4, 3, {"fsdp": 4}, 4),
        ({"tp": 2}, 4, 6, {"fsdp": 2, "tp": 2}, 4),
        ({"dp": "auto", "fsdp": 2}, 4, 6, {"dp": 2, "fsdp": 2}, 2),
        # Resumed on as many devices or more, after a restart on fewer.
        ({}, 8, 6, {"fsdp": 8}, 1),
        ({"num_microbatches": 2}, 12, 3, {"fsdp": 12}, 2),
        # Not auto.
        ({"fsdp": 2}, 4, 6, {"fsdp": 2}, 1),
    ],
)
def test_an_auto_axis_takes_the_devices_that_the_others_leave(fields, available, most, sizes, microbatches):
    config, line = placed(config_with(**fields), available, most)
    assert {name: size for name, size in config.parallel.sizes.items() if size > 1 or name in sizes} == sizes
    assert config.input.num_microbatches == microbatches
    assert config.input.batch_size == 48
    assert most is None or fields.get("fsdp") == 2 or config.sequences_per_device <= most
    assert bool(line) == ("auto" in (fields.get("fsdp", "auto"), fields.get("dp")))


def test_the_line_names_devices_and_microbatches():
    line = placed(config_with(tp=2), 8, 6)[1]
    assert line == "`fsdp` auto: 4 of 8 devices, 2 microbatches of 6 sequences per device"


@pytest.mark.parametrize(
    ("fields", "available", "message"),
    [
        (
            {"tp": 4},
            6,
            "`fsdp` is auto: must be a number on 6 devices, because `tp` 4 does not divide them; or start on other devices",
        ),
        (
            {"tp": 4, "pp": 2},
            4,
            "`fsdp` is auto: must be a number on 4 devices, because `pp` 2 x `tp` 4 does not divide them; "
            "or start on other devices",
        ),
        (
            {},
            7,
            "`fsdp` is 7: must be such that `dp` 1 x `fsdp` divides the 48 sequences of a microbatch (`batch_size` 48, "
            "`num_microbatches` 1); `fsdp` auto takes 7 of 7 devices: start on another number of devices, or set `fsdp` to a "
            "number",
        ),
        (
            {"ep": 4, "model": GPTConfig(mlp="swiglu", moe=MoEConfig(num_experts=4))},
            6,
            "`ep` is 4: must be a divisor of `fsdp` 6; `fsdp` auto takes 6 of 6 devices: start on another number of devices, "
            "or set `fsdp` to a number",
        ),
    ],
)
def test_devices_that_cannot_be_divided_are_refused_in_one_line(fields, available, message):
    with pytest.raises(ConfigError) as error:
        placed(config_with(**fields), available, None)
    assert str(error.value) == message


def test_options_of_sharding_have_no_effect_on_one_device():
    fields = {"gather_per": "pass", "shard_rules": ("*=0",)}
    assert placed(config_with(**fields), 2, None)[0].parallel.gather_per == "pass"
    assert not placed(config_with(**fields), 1, None)[0].is_sharded


def test_the_run_directory_keeps_the_share_of_the_first_start(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    config = config_with()
    assert run_dir.first_share(config) is None
    for available, share in ((8, 6), (2, 6), (12, 6)):
        run_dir.write(config, CORPUS, {}, placed(config, available, run_dir.first_share(config))[0])
        assert run_dir.first_share(config) == share
    assert json.loads(run_dir.config.read_text())["fsdp"] == "auto"
    assert run_dir.saved_config(field="run") == config
    # A new run with other batches, and one that starts over.
    assert run_dir.first_share(config_with(num_microbatches=2)) is None
    assert run_dir.first_share(config_with(resume=False)) is None


@pytest.mark.long
def test_a_run_that_resumes_on_fewer_and_on_more_devices_has_the_losses_of_one_without_interruption(
    tmp_path, monkeypatch, capsys
):
    flags = ("--batch-size", "8", "--fsdp", "auto", "--model.compute-dtype", "float32", "--checkpoint-every", "2")
    schedule = ("--optimizer.extend", "schedule", "--optimizer.warmup-steps", "1", "--optimizer.schedule", "constant")

    def train(name: str, devices: int, steps: int) -> str:
        monkeypatch.setattr(jax, "device_count", lambda: devices)
        assert tiny.train(tmp_path / name, *flags, *schedule, "--steps", str(steps)) == 0
        return capsys.readouterr().out

    starts = [train("run", devices, steps) for devices, steps in ((4, 2), (2, 4), (4, 6))]
    lines = [line for out in starts for line in out.splitlines() if line.startswith("--fsdp auto: ")]
    assert lines == [
        "--fsdp auto: 4 of 4 devices, 1 microbatch of 2 sequences per device",
        "--fsdp auto: 2 of 2 devices, 2 microbatches of 2 sequences per device",
        "--fsdp auto: 4 of 4 devices, 1 microbatch of 2 sequences per device",
    ]
    assert all("resumed from step" in out for out in starts[1:])
    train("whole", 4, 6)
    found, expected = ([loss for _, loss, _ in tiny.losses(tmp_path / name)] for name in ("run", "whole"))
    assert len(found) == 6
    np.testing.assert_allclose(found, expected, rtol=1e-6)
