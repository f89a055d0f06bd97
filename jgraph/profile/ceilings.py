"""What a device can do at most: bytes copied, bfloat16 products, bytes sent to its neighbours, each a second; measured, once.

    python -m jgraph.profile ceilings

Each is the best of several bursts on arrays so large that nothing but the thing itself counts. Those of devices that were
measured for the project are in `ceilings.json` beside this file; a user's own, in a cache.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jgraph.errors import ProfileError
from jgraph.xla.aot import user_cache

_BURSTS = 10
_BURST_SECONDS = 0.03
_REST_SECONDS = 0.2


@dataclass(frozen=True)
class Ceilings:
    """Of a device.

    Attributes:
        device: jax's `device_kind`.
        copy_bytes_per_second: read and written together.
        product_flops_per_second: of a bfloat16 matrix product.
        link_bytes_per_second: that a device receives from the others in an all-gather; None where there was one device.
        source: when they were measured.
    """

    device: str
    copy_bytes_per_second: float
    product_flops_per_second: float
    link_bytes_per_second: float | None
    source: str


def find(device: str) -> Ceilings | None:
    """Of a kind of device: the user's, else the project's, else none. Raises ProfileError where the user's file is damaged."""
    for file in (own_file(device), Path(__file__).with_suffix(".json")):
        try:
            listed = json.loads(file.read_text()) if file.exists() else []
            found = [Ceilings(**entry) for entry in listed]
        except (ValueError, TypeError, RecursionError, OSError) as e:
            raise ProfileError(f"{file} is damaged ({e}); remove it, and run python -m jgraph.profile ceilings again") from e
        if match := [entry for entry in found if entry.device == device]:
            return match[-1]
    return None


def own_file(device: str) -> Path:
    """Where `save` puts what was measured on this machine."""
    return user_cache() / "ceilings" / f"{device.replace(' ', '-').replace('/', '-')}.json"


def save(ceilings: Ceilings) -> Path:
    """Writes to `own_file`."""
    file = own_file(ceilings.device)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps([asdict(ceilings)], indent=2) + "\n")
    return file


def measure(*, copy_bytes: int = 2**31, size: int = 8192, link_bytes: int = 2**30) -> Ceilings:
    """On the devices at hand.

    Args:
        copy_bytes: of the array that is copied.
        size: of the square factors of the product.
        link_bytes: of the array that is gathered on every device.
    """
    devices = jax.local_devices()
    x = jnp.zeros((copy_bytes // 4,), jnp.float32)
    copied = _rate(jax.jit(lambda x: x + 1), x, 2 * x.nbytes)
    factors = jax.random.normal(jax.random.key(0), (2, size, size), jnp.bfloat16)
    multiplied = _rate(jax.jit(lambda f: f[0] @ f[1]), factors, 2 * size**3)
    links = None
    if len(devices) > 1:
        mesh = Mesh(devices, ("all",))
        part, whole = (NamedSharding(mesh, spec) for spec in (PartitionSpec("all"), PartitionSpec()))
        length = link_bytes // 2 // len(devices) * len(devices)
        y = jax.device_put(jnp.zeros((length,), jnp.bfloat16), part)
        received = y.nbytes * (len(devices) - 1) / len(devices)
        links = _rate(jax.jit(lambda y: y, out_shardings=whole), y, received)
    now = datetime.now(UTC).date().isoformat()
    return Ceilings(devices[0].device_kind, copied, multiplied, links, f"measured {now}, jax {jax.__version__}")


def _rate(run: Callable[[jax.Array], jax.Array], x: jax.Array, amount: float) -> float:
    """`amount` a second, in the best of several bursts after a rest: a device at its power limit does less, but no more."""
    run(x).block_until_ready()
    start = time.perf_counter()
    run(x).block_until_ready()
    count = max(1, round(_BURST_SECONDS / (time.perf_counter() - start)))
    rates = []
    for _ in range(_BURSTS):
        time.sleep(_REST_SECONDS)
        start = time.perf_counter()
        y = x
        for _ in range(count):
            y = run(x)  # of the ones before nothing is kept
        y.block_until_ready()
        rates.append(amount * count / (time.perf_counter() - start))
    return max(rates)
