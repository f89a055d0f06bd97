"""The timing loop of `jgraph.compare` and of the benchmarks, with a clock that only programs advance."""

import pytest

from jgraph import timing
from jgraph.timing import Timer, in_round

TIMER = Timer(seconds=1.0, repeats=3, warmup_seconds=0.5)


class Program:
    """Takes `host` seconds to dispatch and `device` seconds more until a wait returns."""

    def __init__(self, host: float, device: float):
        self.host, self.device, self.now, self.ready, self.calls = host, device, 0.0, 0.0, 0

    def run(self):
        self.calls += 1
        self.now += self.host
        self.ready = max(self.ready, self.now) + self.device

    def wait(self):
        self.now = max(self.now, self.ready)


@pytest.fixture
def program(monkeypatch):
    def make(**durations: float) -> Program:
        made = Program(**durations)
        monkeypatch.setattr(timing.time, "perf_counter", lambda: made.now)
        return made

    return make


def test_calls_are_timed_without_a_wait_between_them(program):
    one = program(host=0.25, device=0.5)
    times, calls = TIMER.repeats_ms(one.run, one.wait)
    # The warm-up is one call of 0.75 s, so two calls take at least a second. The host overlaps with the device.
    assert calls == 2
    assert times == [(0.25 + 2 * 0.5) / 2 * 1e3] * 3
    assert one.calls == 1 + 3 * 2


def test_a_slow_program_is_called_once_per_repeat(program):
    one = program(host=0.0, device=8.0)
    assert TIMER.repeats_ms(one.run, one.wait) == ([8e3] * 3, 1)


def test_the_host_time_of_a_dispatch_excludes_the_device(program):
    one = program(host=0.125, device=0.5)
    assert TIMER.dispatch_seconds(one.run, one.wait) == 0.125
    assert one.calls == 3


def test_odd_rounds_are_reversed():
    assert [in_round("ab", number) for number in range(3)] == ["ab", "ba", "ab"]
