"""What holds of any report."""

import json

import pytest

from jgraph.profile.attribution import COMMUNICATION
from jgraph.profile.categories import CATEGORIES

# The kernels of a tiny model leave much of a step idle; of what is busy nearly all must have a category.
LEAST_ATTRIBUTED = 0.97


def check(profile):
    json.dumps(profile, allow_nan=False)
    named = profile["uncaptured"]
    for rank in named["ranks"]:
        assert set(rank["categories"]) <= set(CATEGORIES)
        exposed = sum(category["ms"] for category in rank["categories"].values())
        communication = {name: one["ms"] * (name in COMMUNICATION) for name, one in first["categories"].items()}
    assert exposed == pytest.approx(communication, rel=1e-6)
    kernels = sum(len(track["ms"]) for track in profile["timeline"]["tracks"])
    assert kernels == sum(found["kernels"] for rank in named["ranks"] for found in rank["categories"].values())
