"""Run programs of other projects and store the results in benchmarks/others/results.json.

python -m benchmarks.others SOURCES NAME...     # in the environment of the programs, JAX_PLATFORMS=cpu
"""

import argparse
import json
import multiprocessing
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from benchmarks.others.programs import PROGRAMS, watch

RESULTS = Path(__file__).with_name("results.json")


def main() -> int:
    """Runs each program twice, each time in a new process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", type=Path)
    parser.add_argument("names", nargs="+")
    args = parser.parse_args()
    git = ["git", "-C", str(RESULTS.parent), "rev-parse", "--short", "HEAD"]
    revision = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    for name in args.names:
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            plain, ours = pool.starmap(watch, [(name, args.sources, uses) for uses in (False, True)], chunksize=1)
        program = PROGRAMS[name]
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        results[name] = {
            "package": program.package,
            "version": version(program.package),
            "jax": version("jax"),
            "jgraph": revision,
            "source": program.source,
            "revision": program.revision,
            "failed": plain["failed"],
            **plain["reports"],
            "jit": {"failed": ours["failed"], "steps": len(ours["sums"]), "equal": plain["sums"] == ours["sums"] != []},
        }
        print(json.dumps(results[name], indent=1))
        RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
