"""Recordings by `--profile 4:6` on H200 GPUs (jax 0.11.2, 2026-11-21), of the preset launch-bound with few layers.

`one`: 2 layers on one GPU, with and without capture. `pipeline`: 4 layers, --pp 4 --num-microbatches 4 --batch-size 8.
`sharded`: 2 layers, --fsdp 4 --batch-size 8. The last two recordings have only the trace without capture.
"""

import tarfile
from pathlib import Path

TRACES = Path(__file__).parent / "traces"
NAMES = ("one", "pipeline", "sharded")


def unpack(name: str, into: Path) -> Path:
    """Unpacks a recording. Returns its directory."""
    with tarfile.open(TRACES / f"{name}.tar.xz") as archive:
        archive.extractall(into, filter="data")
    return into / name
