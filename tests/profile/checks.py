"""Checks of a profile report."""

import json

import pytest

from jgraph.profile._categories import CATEGORIES

# The kernels of a tiny model leave most of a step idle. Nearly all of the busy time must have a category.
LEAST_ATTRIBUTED = 0.97


def check(profile):
    check_time(profile)
    assert all(rank["attributed"] >= LEAST_ATTRIBUTED for rank in profile["uncaptured"]["ranks"])


def check_time(profile):
    json.dumps(profile, allow_nan=False)
    named = profile["uncaptured"]
    for rank in named["ranks"]:
        assert set(rank["categories"]) <= set(CATEGORIES)
        exposed = sum(category["ms"] for category in rank["categories"].values())
        assert exposed == pytest.approx(rank["busy_ms"], rel=1e-6)
        assert exposed + rank["idle_ms"] == pytest.approx(named["step_ms"], rel=1e-6)
    first = named["ranks"][0]
    assert sum(group["ms"] for group in profile["groups"]) == pytest.approx(first["busy_ms"], rel=1e-6)
    by_category = dict.fromkeys(first["categories"], 0.0)
    for group in profile["groups"]:
        by_category[group["category"]] += group["ms"]
    assert by_category == pytest.approx({category: found["ms"] for category, found in first["categories"].items()}, rel=1e-6)
    kernels = sum(len(track["ms"]) for track in profile["timeline"]["tracks"])
    assert kernels == sum(found["kernels"] for rank in named["ranks"] for found in rank["categories"].values())
