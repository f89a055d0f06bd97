"""A run on a GPU records a profile with and without capture. Nearly every kernel has a category."""

import json

import pytest

from tests import tiny
from tests.profile.checks import check

pytestmark = pytest.mark.gpu


def test_a_captured_run_is_profiled_with_and_without_capture(tmp_path):
    assert tiny.train(tmp_path / "run", "--steps", "12", "--profile", "3:6") == 0
    profile = json.loads((tmp_path / "run" / "profile" / "profile.json").read_text())
    check(profile)
    assert (profile["captured"]["launches"], profile["captured"]["records"]) == (1, 0)
    assert len(profile["captured"]["steps_ms"]) == len(profile["uncaptured"]["steps_ms"]) == 3
    sums = [sum(sizes) for sizes in zip(*profile["memory"]["usage"]["scopes"].values(), strict=True)]
    assert 0 < max(sums) < profile["memory"]["compiled_peak"]
