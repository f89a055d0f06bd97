"""How many programs may be with the devices at once: on GPUs any number, on CPU devices one that has collectives."""

from typing import TypeVar

import jax

T = TypeVar("T")


def in_turn(results: T) -> T:
    """Returns the results of a program; waits for them first where the next program must not be handed over before.

    CPU devices share one pool of threads, and a rank that waits in a collective keeps its thread. Ranks of two programs can
    so take all threads, each waiting for one that has none left. GPUs have queues: there, this returns at once.

    Args:
        results: pytree of arrays, of one program over the same devices.
    """
    leaf = next(iter(jax.tree.leaves(results)), None)
    if leaf is not None and len(devices := leaf.devices()) > 1 and next(iter(devices)).platform == "cpu":
        jax.block_until_ready(results)
    return results
