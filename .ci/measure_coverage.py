"""Measures line coverage of the tests by tier and file. Takes about 40 CPU minutes for all tiers, so CI does not run it.

python .ci/measure_coverage.py run OUT default          # also: long, parity; `newer` with jax 0.11 or newer
python .ci/measure_coverage.py report OUT > notes/develop/coverage.json
python .ci/measure_coverage.py compare notes/develop/coverage.json new.json

Needs coverage 7.10 or newer in the environment. Coverage starts in every Python process that inherits COVERAGE_PROCESS_START.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ("jgraph", "models/jgraph_models", "benchmarks")
TIERS = {
    "default": "not gpu and not long and not parity and not finetune",
    "long": "long and not gpu and not parity and not finetune",
    "parity": "parity",
    "newer": "(target or not long) and not gpu and not once and not parity and not finetune",
}
FILES = 6  # test files of tests/ itself per chunk


def _chunks(tier: str) -> list[list[str]]:
    """Returns the groups of test paths that are measured in one process each."""
    if tier == "parity":
        return [["tests/parity"]]
    folders = sorted({file.parent.relative_to(ROOT).as_posix() for file in ROOT.glob("tests/*/test_*.py")})
    files = sorted(file.relative_to(ROOT).as_posix() for file in ROOT.glob("tests/test_*.py"))
    groups = [files[i : i + FILES] for i in range(0, len(files), FILES)]
    return [[folder] for folder in folders if folder not in ("tests/finetune", "tests/gpu", "tests/parity")] + groups


def _config(out: Path) -> Path:
    sources = "\n".join(f"    {ROOT / source}" for source in SOURCES)
    config = out / "coveragerc"
    # Warnings would appear in the output of processes that the tests read.
    quiet = "no-data-collected, module-not-measured, module-not-imported, couldnt-parse, no-ctracer, no-sysmon, trace-changed"
    config.write_text(f"[run]\nparallel = true\npatch = _exit\nsource =\n{sources}\ndisable_warnings = {quiet}\n")
    return config


def _pytest(tier: str) -> list[str]:
    return ["nice", "-n", "19", sys.executable, "-m", "pytest", "-n", "0", "-q", "-o", "timeout=3600", "-m", TIERS[tier]]


def _measure(directory: Path, tier: str, paths: list[str], environ: dict[str, str]) -> bool:
    """Runs one chunk, unless an earlier call finished it. Returns whether its tests passed."""
    name = "+".join(paths).replace("/", "-")
    done, data = directory / f"{name}.done", directory / name
    if done.exists():
        return True
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(parents=True)
    environ = environ | {"COVERAGE_FILE": str(data / "data")}
    start = time.monotonic()
    with (directory / f"{name}.log").open("w") as log:
        process = subprocess.run([*_pytest(tier), *paths], cwd=ROOT, env=environ, stdout=log, stderr=log, check=False)
    status = process.returncode
    print(f"{name}: exit status {status}, {time.monotonic() - start:.0f} s", flush=True)
    if status in (0, 5):  # 5: the tier has no test here
        done.touch()
    return done.exists()


def run(out: Path, tier: str, paths: list[str]) -> int:
    """Measures one tier with this interpreter, a process per chunk. A second call runs only the chunks that failed."""
    directory = out / f"{tier}-jax-{metadata.version('jax')}"
    directory.mkdir(parents=True, exist_ok=True)
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    about = {"tier": tier, "jax": metadata.version("jax"), "python": sys.version.split()[0], "revision": git.stdout.strip()}
    about |= {"core": os.environ.get("COVERAGE_CORE", "ctrace"), "date": time.strftime("%Y-%m-%d")}
    about["command"] = shlex.join([*_pytest(tier), *paths])
    (directory / "about.json").write_text(json.dumps(about))
    path = os.pathsep.join([str(ROOT), str(ROOT / "models"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environ = {"JAX_COMPILATION_CACHE_DIR": str(out / "compiled"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environ |= {"PYTHONWARNINGS": "ignore:Error reading persistent compilation cache entry"} | os.environ
    environ |= {"PYTHONPATH": path, "COVERAGE_PROCESS_START": str(_config(out))}
    chunks = [[path] for path in paths] or _chunks(tier)
    passed = [_measure(directory, tier, chunk, environ) for chunk in chunks]
    return int(not all(passed))


def _analysis(out: Path, runs: list[Path]) -> dict[str, dict]:
    """Returns coverage's JSON report by file of the combined data of `runs`."""
    import coverage

    with tempfile.TemporaryDirectory() as temporary:
        combined = coverage.Coverage(data_file=f"{temporary}/combined", config_file=str(_config(out)))
        data = [str(file) for run in runs for file in run.glob("*/data.*")]
        combined.combine(data, keep=True)
        combined.json_report(outfile=f"{temporary}/report.json")
        files = json.loads(Path(temporary, "report.json").read_text())["files"]
    return {Path(ROOT, file).relative_to(ROOT).as_posix(): analysis for file, analysis in sorted(files.items())}


def _ranges(lines: list[int]) -> str:
    """Formats sorted line numbers: [3, 4, 5, 9] is "3-5, 9"."""
    found: list[list[int]] = []
    for line in lines:
        if found and line == found[-1][-1] + 1:
            found[-1] = [found[-1][0], line]
        else:
            found.append([line])
    return ", ".join("-".join(map(str, one)) for one in found)


def _sum(files: dict[str, dict], source: str = "") -> dict[str, float]:
    those = [analysis["summary"] for file, analysis in files.items() if file.startswith(source)]
    statements, missed = (sum(summary[key] for summary in those) for key in ("num_statements", "missing_lines"))
    return {"statements": statements, "missed": missed, "percent": round(100 * (1 - missed / statements), 2)}


def report(out: Path) -> int:
    """Prints JSON: coverage of every run alone, of all together, and by file, one line each."""
    runs = sorted(about.parent for about in out.glob("*/about.json"))
    alone = {run.name: json.loads((run / "about.json").read_text()) | _sum(_analysis(out, [run]), "jgraph/") for run in runs}
    together = _analysis(out, runs)
    default = _analysis(out, [run for run in runs if run.name.startswith("default-")])
    head = {
        "note": "Line coverage of all tests without a GPU. `percent` of a run counts jgraph/ alone.",
        "command": "python .ci/measure_coverage.py report OUT",
        "runs": alone,
        "total": {source: _sum(together, f"{source}/") for source in SOURCES},
    }
    rows = []
    for file, analysis in together.items():
        summary = analysis["summary"]
        row = {"statements": summary["num_statements"], "missed": summary["missing_lines"]}
        row |= {"percent": round(summary["percent_covered"], 1), "missed_by_default": default[file]["summary"]["missing_lines"]}
        rows.append(f"    {json.dumps(file)}: {json.dumps(row | {'missed_lines': _ranges(analysis['missing_lines'])})}")
    print(json.dumps(head, indent=2)[:-2] + ',\n  "files": {\n' + ",\n".join(rows) + "\n  }\n}")
    return 0


def compare(before: Path, after: Path) -> int:
    """Prints the files with more missed lines than before. Returns 1 if there is any."""
    old, new = (json.loads(file.read_text())["files"] for file in (before, after))
    worse = {file: (old.get(file, {"missed": 0})["missed"], row["missed"]) for file, row in new.items()}
    worse = {file: counts for file, counts in worse.items() if counts[1] > counts[0]}
    for file, (was, now) in worse.items():
        print(f"{file}: {was} lines missed before, {now} now")
    return int(bool(worse))


def main() -> int:
    """Runs the command line and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("run")
    command.add_argument("out", type=Path)
    command.add_argument("tier", choices=TIERS)
    command.add_argument("paths", nargs="*", help="default: all tests, in chunks")
    commands.add_parser("report").add_argument("out", type=Path)
    command = commands.add_parser("compare")
    command.add_argument("before", type=Path)
    command.add_argument("after", type=Path)
    args = parser.parse_args()
    if args.command == "run":
        return run(args.out.absolute(), args.tier, args.paths)
    return report(args.out.absolute()) if args.command == "report" else compare(args.before, args.after)


if __name__ == "__main__":
    sys.exit(main())
