"""Reports of the watchdog on devices that hang, and the message. No test waits longer than a fraction of a second."""

import threading
import time
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from jgraph.train._watchdog import Wait, Watchdog, hang_message
from jgraph.train.config import TrainConfig
from jgraph.train.rundir import RunDir
from jgraph.xla._capture import CaptureReport, Outside

PROGRAM = """HloModule jit_step

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

ENTRY %main (p: f32[8], q: f32[4]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %q = f32[4]{0} parameter(1)
  %all-gather-start = (f32[4]{0}, f32[8]{0}) all-gather-start(%q), channel_id=1, replica_groups=[1,2]<=[2], dimensions={0}
  %all-gather-done = f32[8]{0} all-gather-done(%all-gather-start)
  %all-reduce.1 = f32[8]{0} all-reduce(%p), channel_id=2, replica_groups={{0,1},{2,3}}, to_apply=%sum
  %all-reduce.2 = f32[8]{0} all-reduce(%all-gather-done), channel_id=3, replica_groups={{0,1},{2,3}}, to_apply=%sum
  %permute = f32[8]{0} collective-permute(%all-reduce.1), channel_id=4, source_target_pairs={{0,1},{1,0}}
  %all-to-all = f32[8]{0} all-to-all(%permute), channel_id=5, replica_groups=mesh['data'=2,'pipe'=2] {'pipe'}, dimensions={0}
  ROOT %sum.1 = f32[8]{0} add(%all-to-all, %all-reduce.2)
}
"""
CAPTURED = CaptureReport(1, 4, 4)
PARTLY = CaptureReport(1, 3, 4, (Outside("AllReduce", 1, "COLLECTIVES is off by default"),))


@pytest.fixture
def reports():
    """Collects the waits that a watchdog reports. Sets the event at the first report."""
    return SimpleNamespace(waits=[], event=threading.Event())


@pytest.fixture
def watchdog(reports):
    def hung(wait: Wait) -> None:
        reports.waits.append(wait)
        reports.event.set()

    with Watchdog(0.2, hung) as watchdog:
        yield watchdog


def test_a_wait_longer_than_the_limit_is_reported_once_with_its_program(watchdog, reports):
    program = object()
    with watchdog.over(lambda: "step 3", program):
        assert reports.event.wait(60)
        time.sleep(0.3)
    ((description, reported),) = [(wait.about(), wait.program) for wait in reports.waits]
    assert (description, reported) == ("step 3", program)


def test_short_waits_and_time_without_a_wait_are_not_reported(watchdog, reports):
    for number in range(8):
        with watchdog.over(f"step {number}".__str__):
            time.sleep(0.05)
    time.sleep(0.4)
    assert watchdog.wait(lambda: "an array", jnp.ones(2)).sum() == 2
    assert not reports.waits


def test_each_array_that_arrives_restarts_the_limit(watchdog, reports):
    def slow() -> SimpleNamespace:
        return SimpleNamespace(block_until_ready=lambda: time.sleep(0.05))

    watchdog.wait(lambda: "steps 0 to 9", {"losses": [slow() for _ in range(10)]})
    assert not reports.waits


def test_an_exception_ends_a_wait(watchdog, reports):
    with pytest.raises(KeyError), watchdog.over(lambda: "step 0"):
        raise KeyError
    time.sleep(0.4)
    assert not reports.waits


def test_without_a_limit_no_thread_is_started(reports):
    before = threading.active_count()
    with Watchdog(0, reports.waits.append):
        assert threading.active_count() == before


def message(run_dir, capture=None, **fields) -> str:
    program = SimpleNamespace(as_text=lambda: PROGRAM, capture=capture)
    return hang_message(
        Wait(lambda: "steps 4 to 6", program), TrainConfig.from_fields(hang_seconds=3, **fields), RunDir(run_dir)
    )


def test_a_message_names_steps_seconds_collectives_and_their_devices(tmp_path):
    line = message(tmp_path)
    assert "steps 4 to 6 did not finish within 3 s: the devices hang" in line
    assert "1 all-gather over [1,2]<=[2], 2 all-reduce over {{0,1},{2,3}}, 1 collective-permute over {{0,1},{1,0}}, " in line
    assert "1 all-to-all over mesh['data'=2,'pipe'=2] {'pipe'}; " in line
    assert "command buffers" not in line


def test_a_message_names_the_graph_option_only_if_collectives_are_captured(tmp_path):
    captured, partly = message(tmp_path, CAPTURED), message(tmp_path, PARTLY)
    assert "collectives inside command buffers" in captured
    assert "`graph` auto" in captured
    assert "collectives outside command buffers" in partly
    assert "`graph`" not in partly


def test_a_message_names_the_last_complete_checkpoint(tmp_path):
    assert "there is no complete checkpoint: run the same command again to start" in message(tmp_path)
    for name in ("9", "10", "11.orbax-checkpoint-tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert f"again to resume from the last complete checkpoint, {tmp_path / 'checkpoints' / '10'};" in message(tmp_path)
    assert "the same command again, without `resume` off, to resume" in message(tmp_path, resume=False)


def test_a_message_omits_a_program_text_that_is_not_available(tmp_path):
    def broken():
        raise RuntimeError

    wait = Wait(lambda: "step 1", SimpleNamespace(as_text=broken, capture=None))
    assert "step 1 did not finish" in hang_message(wait, TrainConfig.from_fields(hang_seconds=3), RunDir(tmp_path))
