"""Rates of the devices at hand, measured and kept: what the least time of a kernel is computed from.

    python -m jgraph.profile roofline

Each is the best of several bursts on arrays so large that nothing but the thing itself counts. They go to the user's cache,
and are taken instead of those in `jgraph.device`.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jgraph import device
from jgraph.device import Device
from jgraph.errors import ProfileError
from jgraph.xla.cache import user_cache

_BURSTS = 10
_BURST_SECONDS = 0.03
_REST_SECONDS = 0.2


def find(device_kind: str) -> Device | None:
    """Returns the rates that the user measured, else those of the table. Raises ProfileError for a damaged file of theirs."""
    file = own_file(device_kind)
    try:
        return Device(**json.loads(file.read_text()))
    except FileNotFoundError:
        return device.find(device_kind)
    except (ValueError, TypeError, RecursionError, OSError) as e:
        raise ProfileError(f"{file} is damaged ({e}); remove it, and measure again") from e


def own_file(device_kind: str) -> Path:
    """Returns where `save` puts what was measured on this machine."""
    return user_cache() / "roofline" / f"{device_kind.replace(' ', '-').replace('/', '-')}.json"


def save(measured: Device) -> Path:
    """Writes rates to `own_file`, and returns where that is."""
    file = own_file(measured.name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(asdict(measured), indent=2) + "\n")
    return file


def measure(*, copy_bytes: int = 2**31, size: int = 8192, link_bytes: int = 2**30) -> Device:
    """Measures the devices at hand, by an array copied, square factors multiplied, and an array gathered on every device."""
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
    source = f"measured {datetime.now(UTC).date().isoformat()}, jax {jax.__version__}"
    return Device(devices[0].device_kind, multiplied, copied, links, source=source)


def _rate(run: Callable[[jax.Array], jax.Array], x: jax.Array, amount: float) -> float:
    """Returns `amount` a second, in the best of several bursts after a rest: at its power limit a device does less."""
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
