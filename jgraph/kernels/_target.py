"""The device that kernels are chosen for."""

import jax

from jgraph.device import Device, find


def target() -> Device | None:
    """Returns the device that is compiled for: the abstract device of the mesh in context, else jax's first.

    None for one that nobody described.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    return find((described or jax.devices()[0]).device_kind)
