"""The table of devices."""

import pytest

from jgraph.device import DEVICES, peak_flops
from jgraph.xla import aot


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H200 NVL", None),
        ("cpu", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_peak_flops_are_the_value_of_the_datasheet_or_none(kind, peak):
    assert peak_flops(kind) == peak


def test_every_compilation_target_is_in_the_table():
    assert set(aot.GPUS) == {entry.aot for entry in DEVICES if entry.aot}
