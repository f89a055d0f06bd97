"""The table of supported GPUs: rates for MFU and rooflines, compute capability, and compile-only targets.

Also the environment variables of XLA's CPU client, for several CPU devices. `jgraph.dispatch` sets them and has the reasons.
"""

import os
from dataclasses import dataclass

_SCHEDULER = "--xla_cpu_enable_concurrency_optimized_scheduler"


@dataclass(frozen=True)
class Device:
    """The properties of a GPU model."""

    name: str  # JAX's `jax.Device.device_kind`
    product_flops_per_second: float  # of dense bfloat16 matmuls, without sparsity
    copy_bytes_per_second: float  # bytes read plus bytes written
    link_bytes_per_second: float | None = None  # received from other GPUs in an all-gather; None if unknown
    aot: str = ""  # short name for compiling without the GPU; empty if that is not supported
    source: str = "datasheet"  # of the rates
    fp8_flops_per_second: float | None = None  # of dense FP8 matmuls; None if the GPU has none
    capability: tuple[int, int] = (9, 0)  # NVIDIA's compute capability

    @property
    def has_fp8(self) -> bool:
        return self.capability >= (8, 9)

    @property
    def has_mxfp8(self) -> bool:
        """True if the GPU has matmuls of FP8 with a scale for each block."""
        return self.capability >= (10, 0)


_MEASURED = "matmuls: datasheet; copies and links: measured 2026-11-21, jax 0.11.2"
# From NVIDIA's datasheets of H100 (SXM, PCIe), H200, HGX B200 (4.5 PFLOP/s with sparsity, 7.7 TB/s per GPU), A100 and L40S.
# If a datasheet gives only the rate with sparsity, half of it.
DEVICES = (
    Device("NVIDIA H200", 989e12, 4.276e12, 3.276e11, "h200", _MEASURED, 1979e12),
    Device("NVIDIA H100 80GB HBM3", 989e12, 3.35e12, None, "h100", fp8_flops_per_second=1979e12),
    Device("NVIDIA H100 PCIe", 756e12, 2.0e12, fp8_flops_per_second=1513e12),
    Device("NVIDIA B200", 2250e12, 7.7e12, None, "b200", fp8_flops_per_second=4500e12, capability=(10, 0)),
    Device("NVIDIA A100-SXM4-80GB", 312e12, 2.039e12, capability=(8, 0)),
    Device("NVIDIA A100 80GB PCIe", 312e12, 1.935e12, capability=(8, 0)),
    Device("NVIDIA A100-SXM4-40GB", 312e12, 1.555e12, capability=(8, 0)),
    Device("NVIDIA A100-PCIE-40GB", 312e12, 1.555e12, capability=(8, 0)),
    Device("NVIDIA L40S", 362e12, 0.864e12, fp8_flops_per_second=733e12, capability=(8, 9)),
)


def find(device_kind: str) -> Device | None:
    """Returns the properties of the GPU with this `jax.Device.device_kind`, an exact match. None if it is not supported."""
    return next((device for device in DEVICES if device.name == device_kind), None)


def peak_flops(device_kind: str) -> float | None:
    """Returns the peak FLOP/s of dense bfloat16 matmuls for a `jax.Device.device_kind`. None if the GPU is not supported."""
    device = find(device_kind)
    return device.product_flops_per_second if device else None


def ordered(flags: str) -> str:
    """Adds the flag for one order of collectives on CPU devices to the text of XLA_FLAGS, unless it has this flag."""
    return flags if _SCHEDULER in flags else f"{flags} {_SCHEDULER}=false".strip()


def cpu_threads(count: int) -> str:
    """Returns the value of NPROC for `count` CPU devices: the number of threads of XLA's CPU client."""
    return str(max(4 * count, os.cpu_count() or 1))
