"""A run on a GPU profiles itself: both traces, and nearly every kernel with a category."""

import json

import pytest

from tests import tiny
from tests.profile.checks import check

pytestmark = pytest.mark.gpu


def test_a_captured_run_is_profiled_both_ways(tmp_path):
    assert tiny.train(tmp_path / "run", "--steps", "12", "--profile", "3:6") == 0
    profile = json.loads((tmp_path / "run" / "profile" / "profile.json").read_text())
    check(profile)
    assert (profile["captured"]["launches"], profile["captured"]["records"]) == (1, 0)
    assert len(profile["captured"]["steps_ms"]) == len(profile["uncaptured"]["steps_ms"]) == 3
