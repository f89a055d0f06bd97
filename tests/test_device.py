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
def test_the_peak_is_the_datasheet_s_or_none(kind, peak):
    assert peak_flops(kind) == peak


def test_a_gpu_that_programs_are_compiled_for_has_rates():
    assert set(aot.GPUS) == {entry.aot for entry in DEVICES if entry.aot}
