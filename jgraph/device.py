"""What a GPU can do, by the name that the driver gives it. The only table of it: for MFU, rooflines and AOT targets."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """The rates of a kind of GPU, each a second.

    Attributes:
        name: jax's `device_kind`.
        product_flops_per_second: of dense bfloat16 matrix products, without sparsity.
        copy_bytes_per_second: read and written together.
        link_bytes_per_second: received from the other devices in an all-gather; None where it is not known.
        fp8_flops_per_second: of dense FP8 matrix products; None where the GPU has none.
        capability: NVIDIA's compute capability.
        aot: the target of that name, for which `jgraph.xla.aot` has a description; empty where there is none.
        source: where the numbers come from.
    """

    name: str
    product_flops_per_second: float
    copy_bytes_per_second: float
    link_bytes_per_second: float | None = None
    aot: str = ""
    source: str = "datasheet"
    fp8_flops_per_second: float | None = None
    capability: tuple[int, int] = (9, 0)

    @property
    def has_fp8(self) -> bool:
        """Returns whether the GPU has FP8 matrix products."""
        return self.capability >= (8, 9)


_MEASURED = "products: datasheet; copies and links: measured 2026-11-21, jax 0.11.2"
# NVIDIA's datasheets: H100 (SXM, PCIe), H200, HGX B200 (its 4.5 PFLOP/s are sparse, its memory 7.7 TB/s a GPU), A100, L40S.
# Where they give only the rate with sparsity, half of it.
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
    """Returns the entry of `jax.Device.device_kind`; None for a device that is not in the table."""
    return next((device for device in DEVICES if device.name == device_kind), None)


def peak_flops(device_kind: str) -> float | None:
    """Returns dense bfloat16 FLOP/s by the datasheet; None for a device that is not in the table."""
    device = find(device_kind)
    return device.product_flops_per_second if device else None
