"""Recordings that `--profile 4:6` made on H200s (jax 0.11.2, 2026-11-21), of the preset launch-bound with few layers.

`one`: 2 layers on one GPU, both ways. `pipeline`: 4 layers, --pp 4 --num-microbatches 4 --batch-size 8. `sharded`: 2 layers,
--fsdp 4 --batch-size 8. Of the latter two only the trace without capture is kept.
"""

import tarfile
from pathlib import Path

TRACES = Path(__file__).parent / "traces"
NAMES = ("one", "pipeline", "sharded")


def unpack(name: str, into: Path) -> Path:
    """The directory that a recorder left."""
    with tarfile.open(TRACES / f"{name}.tar.xz") as archive:
        archive.extractall(into, filter="data")
    return into / name
