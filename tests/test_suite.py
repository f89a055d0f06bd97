"""Tests of `python -m benchmarks`: list, run, compare, the generated tables, and the stored results."""

import ast
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

import benchmarks
from benchmarks import cli, compare, readme, rows, runner
from jgraph_models.gpt_config import GPTConfig

FOLDER = Path(cli.__file__).parent
RESULTS = sorted(runner.RESULTS.glob("*.json"))
SCRIPTS = runner.find_benchmarks()

# Functions that may read the time. `jgraph/timing.py` times steps.
CLOCKS = {
    # A soak times each step, to find slow ones.
    "harness.py": {"soak"},
    # These measure the duration of tracing, compilation, setup or the first step.
    "programs/graphed.py": {"time_blocks", "time_pipeline"},
    "programs/pipeline.py": {"spmd_step", "mpmd_step"},
    "programs/step.py": {"of"},
    # Ranks under torchrun must agree on the number of steps and on the slowest time.
    "peers/ranks.py": {"timed", "time_training"},
}


@pytest.fixture(autouse=True)
def _pipe(monkeypatch):
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(capsys):
    """Returns a function that runs the command and returns the lines on stdout."""

    def run(*args: object) -> list[str]:
        assert cli.main([str(arg) for arg in args]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return [" ".join(line.replace("|", " ").split()) for line in out.splitlines()]

    return run


@pytest.fixture
def run_error(capsys):
    """Returns a function that runs the command, expects exit code 2, and returns the error line."""

    def run(*args: object) -> str:
        assert cli.main([str(arg) for arg in args]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return run


@pytest.fixture
def write(tmp_path):
    """Returns a function that writes a results file with one work and returns its path."""

    def write(name: str, *rows: dict, device: str = "4 x X", batch: int = 8) -> Path:
        common = {
            "environment": {"date": f"2026-01-0{len(name)}", "revision": "abc", "jax": "0.11.2"},
            "options": {"name": name},
        }
        work = common | {"config": {"batch_size": batch}, "device": device, "rows": list(rows)}
        (tmp_path / f"{name}.json").write_text(json.dumps({"works": {"gpt": work}}))
        return tmp_path / f"{name}.json"

    return write


def row(variant: str, *repeats_ms: float) -> dict:
    return {"system": "jgraph", "variant": variant, "ms": sorted(repeats_ms)[len(repeats_ms) // 2], "repeats_ms": repeats_ms}


def test_compare_reports_a_change_only_if_the_repeats_do_not_overlap(run, write):
    a = write("a", row("x", 10, 11, 12), row("y", 10, 11, 12), row("z", 10, 11, 12), row("once", 10))
    b = write("bb", row("x", 8, 9, 9.9), row("y", 12, 13, 14), row("z", 12.1, 13, 14), row("once", 5))
    lines = run("compare", a, b)
    assert lines[1] == "2026-01-01, revision abc, jax 0.11.2, 4 x X"
    assert lines[3].startswith("2026-01-02")
    assert lines[-4:] == [
        "gpt, jgraph, x 11.000 9.000 0.818 faster",
        "gpt, jgraph, y 11.000 13.000 1.182 within the spread",
        "gpt, jgraph, z 11.000 13.000 1.182 slower",
        "gpt, jgraph, once 10.000 5.000 0.500 no spread known",
    ]
    assert not any("warning" in line for line in lines)  # the names of the files are ignored


def test_compare_warns_about_other_devices_and_sizes(run, write):
    a, b = write("a", row("", 1, 1)), write("b", row("", 1, 1), device="8 x Y", batch=16)
    (warning,) = (line for line in run("compare", a, b) if line.startswith("warning"))
    assert warning.endswith(": config.batch_size 8 -> 16; device 4 x X -> 8 x Y")


def test_a_config_field_missing_from_an_old_result_counts_as_default(tmp_path, run, write):
    a, b = write("a", row("", 1, 1)), write("b", row("", 1, 1))
    for graph, warned in (("auto", False), ("off", True)):
        data = json.loads(a.read_text())
        data["works"]["gpt"]["config"]["graph"] = graph
        b.write_text(json.dumps(data))
        assert any("config.graph auto -> off" in line for line in run("compare", a, b)) == warned


def test_compare_lists_rows_of_one_file_with_the_error_in_the_other(run, write):
    failed = {"system": "jgraph", "variant": "x", "failed": "out of memory"}
    lines = run("compare", write("a", row("x", 1, 1), row("y", 1, 1)), write("b", failed, row("z", 1, 1)))
    assert lines[-4:] == [
        "the files have no row in common",
        "only in A: gpt, jgraph, x (other file: out of memory)",
        "only in A: gpt, jgraph, y",
        "only in B: gpt, jgraph, z",
    ]


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_every_stored_result_compares_equal_to_itself(file, run, run_error):
    if file.stem in ("dtype_rules", "plans", "step_memory"):  # bytes, and times of other results
        assert f"{file} has no times" in run_error("compare", file, file)
        return
    same = [line for line in run("compare", file, file) if " 1.000 " in line]
    assert same
    assert len(same) == sum(bool(row.ms) for row in compare.timed_rows(file).values())
    assert all(line.endswith(("within the spread", "no spread known")) for line in same)


@pytest.mark.parametrize("text", [None, "{", "[1]", "{}", '{"ms": "fast"}', "\xff"])
def test_an_invalid_results_file_is_rejected_by_name(text, tmp_path, write, run_error):
    file = tmp_path / "no.json"
    if text is not None:
        file.write_text(text, encoding="latin-1")
    error = run_error("compare", write("a", row("", 1, 1)), file)
    assert str(file) in error
    assert "expected JSON" in error


def test_list_shows_every_benchmark_and_its_results(run):
    lines = run("list")
    for name in ("callables", "convergence", "fsdp", "pipeline", "single_gpu", "split_backward"):
        assert any(line.startswith(f"{name} {name}.json ") for line in lines)
    assert any(line.startswith("single_gpu single_gpu_1b3.json ") and "NVIDIA H200" in line for line in lines)
    assert any(line.startswith("dtype_rules dtype_rules.json ") for line in lines)  # a result without a benchmark
    assert not any(line.startswith(("harness", "runner", "cli", "?")) for line in lines)


def test_show_prints_every_row_of_a_folder(run, write):
    failed = {"system": "torch", "variant": "eager", "failed": "failed: RuntimeError: no"}
    write("a", row("x", 10, 11, 12), {"system": "torch", "variant": "compile", "ms": 22.0}, failed)
    lines = run("show", write("b", failed).parent)
    assert "a gpt jgraph x 11.000 2.000" in lines
    assert "a gpt torch compile 22.000 2.000" in lines
    assert "b gpt torch eager failed: RuntimeError: no" in lines


def test_flags_after_the_name_are_passed_to_the_benchmark(tmp_path, monkeypatch, capsys):
    source = (
        '"""Prints flags."""\n\nclass Echo:\n    def main(self, name, flags):\n        raise SystemExit(f"{name} {flags}")\n\n'
    )
    (tmp_path / "echo.py").write_text(f"{source}\nBENCHMARK = Echo()\n")
    monkeypatch.setattr(benchmarks, "__path__", [str(tmp_path)])
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["run", "echo", "--help", "--x", "1"])
    assert exit_info.value.code == "echo ['--help', '--x', '1']"


def test_an_unknown_benchmark_is_rejected_with_the_known_names(run_error):
    error = run_error("run", "nope", "--work", "gpt-1b3")
    assert error.startswith("benchmarks: error: unknown benchmark nope; choose one of: callables, ")


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_the_benchmark_of_every_stored_result_draws_its_page(file):
    if file.stem == "pipeline_trace":  # recorded actions, which are a picture
        return
    page = readme.results_page(file.with_suffix(".md"))
    if file.stem == "soaks" or runner.benchmark_of(file.stem, SCRIPTS) in SCRIPTS:
        assert page.startswith("# ")
        assert page.count("\n|") > len(compare.read(file))


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_every_stored_row_matches_the_schema(file):
    for result in compare.read(file).values():
        assert result["environment"]["date"]
        for row in result["rows"]:
            assert not rows.unknown_keys(row)
            assert rows.row_name(row)


def test_the_tables_of_readme_and_benchmarks_page_match_the_results(run):
    run("readme", "--check")


@pytest.mark.long
def test_a_page_that_differs_from_the_results_is_reported_and_rewritten(tmp_path, monkeypatch, capsys, run, run_error):
    text = f"# x\n\nBefore.\n\n{readme.BEGIN}\n| 1.19 |\n{readme.END}\n\nAfter.\n"
    for name in ("README", "PAGE"):
        monkeypatch.setattr(readme, name, tmp_path / f"{name}.md")
        getattr(readme, name).write_text(text)
    assert cli.main(["readme", "--check"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert readme.README.read_text() == text
    run("readme")
    run("readme", "--check")
    for page, tables in ((readme.README, readme.gains_table()), (readme.PAGE, readme.page_tables())):
        head, tail = text.partition(readme.BEGIN)[0], text.partition(readme.END)[2]
        assert page.read_text() == f"{head}{readme.BEGIN}\n{tables}\n{readme.END}{tail}"
    readme.PAGE.write_text(text.replace(readme.END, ""))
    assert readme.END in run_error("readme")


def test_the_fastest_time_is_bold_and_the_jgraph_column_has_the_fastest_kernels():
    times = {("jgraph", ""): 4.0, ("jgraph", "norm=fused"): 2.0, ("jgraph", "graph=off"): 1.0, ("jgraph", "xla_a=1"): 0.5}
    times |= {("torch", "eager"): 30.0, ("torch", "CUDA graph"): 3.0}
    rows = [
        {"system": system, "variant": variant, "ms": ms, "repeats_ms": [ms, ms], "peak_bytes": 2e9 / ms}
        for (system, variant), ms in times.items()
    ]
    config = {"batch_size": 2, "seq_len": 128, "model": {"num_layers": 12, "d_model": 256}}
    rows += [{"system": "torch", "variant": "compile", "failed": "no"}]
    line = readme.one_gpu_table([("tiny", {"config": config, "rows": rows})])[-1]
    shape = "tiny, 12 layers of 256, 2x128 tokens"
    assert line == f"| {shape} | 2.00 | **1.00** | 30.0 | 1.50, fastest of 2, 1 failed | 1.0, 0.67 |"


def timed(system: str, schedule: str, *repeats_ms: float, rounds: bool = False) -> dict:
    labels = {"system": system, "schedule": schedule, "variant": "", "ms": sorted(repeats_ms)[len(repeats_ms) // 2]}
    return labels | {"repeats_ms": repeats_ms} | ({"rounds": list(range(len(repeats_ms)))} if rounds else {})


@pytest.fixture
def row_of():
    """Returns a function that formats a pipeline on two GPUs from the rows of its newest and earlier runs."""

    def row_of(rows: list[dict], *earlier: list[dict]) -> list[str]:
        work = {"size": {"d_model": 64, "tokens": 32}, "device": "2 x X", "ranks": 2}
        runs = [{"mlp": work | {"rows": rows}} for rows in (rows, *earlier)]
        line = readme.multi_gpu_table(dict(zip(("pipeline", "pipeline_earlier"), runs, strict=False)))[-1]
        return [cell.strip() for cell in line.strip("|").split("|")][1:]

    return row_of


def test_a_ratio_is_the_median_of_rounds_with_its_range(row_of):
    ours, peer = (timed(*one, rounds=True) for one in (("jgraph", "aligned", 10, 20, 30), ("torch", "1F1B", 22, 20, 30)))
    assert row_of([ours, peer]) == ["2 x X", "22.0 (1F1B; only variant)", "20.0 (aligned)", "1.00 (1.00 to 2.20)", "3 rounds"]


def test_several_stored_runs_give_a_range_of_ratios(row_of):
    now = [timed("jgraph", "aligned", 9.0), timed("torch", "1F1B", 27.0)]
    earlier = [timed("jgraph", "aligned", 10.0), timed("torch", "1F1B", 20.0), timed("torch", "ZBV", 60.0)]
    cells = row_of(now, earlier)
    assert cells[1:] == [
        "20.0 to 27.0 (1F1B; fastest of 2)",
        "9.00 to 10.0 (aligned)",
        "2.00 to 3.00",
        "2 PyTorch runs, 2 jgraph runs",
    ]


def test_failed_pytorch_variants_are_counted(row_of):
    failed = {"system": "torch", "schedule": "ZBV", "variant": "compile", "failed": "failed: RuntimeError: no"}
    cells = row_of([timed("jgraph", "aligned", 10, 11, 12), timed("torch", "1F1B", 12, 13, 14), failed])
    assert cells[1:] == ["13.0 (1F1B; only variant, 1 failed)", "11.0 (aligned)", "1.18, within the spread", "one run"]


def test_kept_and_resharded_parameters_are_compared_separately():
    def row(system, variant, ms):
        return {"system": system, "variant": variant, "ms": ms, "repeats_ms": [ms]}

    rows = [row("torch", "compile:reshard", 30.0), row("jgraph", "", 20.0), row("jgraph", "reshard=yes", 24.0)]
    work = {"config": {"batch_size": 2, "seq_len": 8}, "device": "2 x X", "ranks": 2, "rows": rows}
    rows += [row("jgraph", "layout=dp", 1.0)]
    kept, resharded, replicated = readme.multi_gpu_table({"fsdp": {"gpt": work}})[-3:]
    assert "| not run | 1.00 (layout=dp) |  |  |" in replicated
    assert "| not run | 20.0 (default) |  |  |" in kept
    assert "| 30.0 (compile:reshard; only variant) | 24.0 (reshard=yes) | 1.25 |" in resharded


def fp8_work(**times) -> dict:
    rows = [
        {"system": name.split("_")[0], "variant": name.partition("_")[2].replace("_", " "), "ms": ms, "repeats_ms": [ms]}
        for name, ms in times.items()
    ]
    return {"config": {"batch_size": 2, "seq_len": 8}, "device": "X", "rows": rows, "environment": {"date": "2026-01-01"}}


def test_fp8_is_compared_with_the_fastest_pytorch_and_with_jgraph_bf16():
    times = {"jgraph_fp8_delayed": 8.0, "jgraph_fp8_current": 9.0, "jgraph_fp8=delayed:hybrid:fast": 7.0, "jgraph_bf16": 12.0}
    one = fp8_work(**times, torch_compile=13.0, torch_float8_rowwise_compile=10.0)
    one["rows"].append({"system": "torch", "variant": "float8 tensorwise compile", "failed": "no"})
    line = readme.fp8_table([("gpt", one)])[-1]
    ratio = "1.25 (float8 rowwise compile; fastest of 2, 1 failed)"
    assert line == f"| gpt, 2x8 tokens | X | 12.0 | 9.00 | 8.00 | 7.00 | 13.0 | 10.0 |  | {ratio} | 1.50 |"


def test_sharded_fp8_is_compared_by_placement():
    times = {"jgraph_fp8=delayed": 8.0, "jgraph": 12.0, "torch_compile": 13.0, "torch_compile:float8:reshard": 10.0}
    kept, resharded = readme.fp8_table([("gpt", fp8_work(**times))])[-2:]
    shown = "| X | 12.0 |  | 8.00 |  | 13.0 |  |  | 1.62 (compile; only variant) | 1.50 |"
    assert kept == f"| gpt, 2x8 tokens, parameters kept {shown}"
    assert resharded == "| gpt, 2x8 tokens, parameters resharded | X |  |  |  |  |  | 10.0 |  | only variant |  |"


def test_fp8_results_add_a_table_and_results_pages(tmp_path, monkeypatch):
    for file in RESULTS:
        if "fp8" not in file.stem:
            shutil.copy(file, tmp_path)
    monkeypatch.setattr(runner, "RESULTS", tmp_path)
    assert "## FP8" not in readme.page_tables()
    for name, title in (("fp8", "# A training step in FP8"), ("fsdp_fp8", "# Sharded training")):
        work = fp8_work(jgraph=1.0) | {"ranks": 2}
        work["rows"][0]["ranks"] = 2
        work["config"] |= {"model": asdict(GPTConfig()), "graph": "auto", "xla_options": []}
        work["environment"] |= {"revision": "x"}
        (tmp_path / f"{name}.json").write_text(json.dumps({"works": {"gpt": work}}))
        assert readme.results_page(tmp_path / f"{name}.md").startswith(title)
    (tmp_path / "pipeline_fp8.json").write_text((tmp_path / "fp8.json").read_text())
    table = readme.page_tables().partition("## FP8")[2]
    assert "[fp8](../benchmarks/results/fp8.md), [fsdp_fp8](../benchmarks/results/fsdp_fp8.md)" in " ".join(table.split())
    assert table.count("| gpt, 2x8 tokens | X | 1.00 |") == 2
    assert table.count("| pipeline, gpt, 2x8 tokens | X | 1.00 |") == 1


def test_benchmarks_do_not_import_tests():
    imports = [node for file in FOLDER.rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    modules = [node.module or "" for node in imports if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names]
    assert not [name for name in modules if name.partition(".")[0] == "tests"]


def test_benchmarks_have_no_timing_loop_beside_the_one_of_the_library():
    found = set()
    for file in FOLDER.rglob("*.py"):
        tree = ast.parse(file.read_text())
        for scope in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Module)):
            nested = {n for n in ast.walk(scope) if isinstance(n, ast.FunctionDef) and n is not scope}
            own = set(ast.walk(scope)) - {n for function in nested for n in ast.walk(function)}
            words = {n.attr if isinstance(n, ast.Attribute) else n.id for n in own if isinstance(n, ast.Attribute | ast.Name)}
            if words & {"perf_counter", "perf_counter_ns", "timeit", "process_time"}:
                found.add((file.relative_to(FOLDER).as_posix(), getattr(scope, "name", "the module")))
    allowed = {(name, function) for name, functions in CLOCKS.items() for function in functions}
    assert ("harness.py", "soak") in found
    assert found <= allowed
