"""Runs the benchmarks at tiny sizes on CPU devices, from the candidate processes to the tables."""

import contextlib
import copy
import dataclasses
import importlib.util
import io
import json
import re
import subprocess
import sys
import time
from itertools import count

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgraph
from benchmarks import (
    cli,
    decode,
    finetune,
    fp8,
    fsdp,
    grouped,
    kernels,
    moe,
    plans,
    readme,
    restarts,
    rows,
    runner,
    single_gpu,
    split_backward,
    startup,
    step_memory,
    tensor_context,
    works,
)
from benchmarks.peers import plain_jax, plain_jax_decode
from benchmarks.peers.te_variant import TEVariant, is_te, parse_sharded_variant, parse_variant
from benchmarks.programs.models import gpt_blocks
from benchmarks.rows import step_flops, unknown_keys
from benchmarks.turns import Candidate, TimingOptions, race
from jgraph.train.presets import preset
from jgraph_models.gpt import GPT

pytestmark = [pytest.mark.once, pytest.mark.long]

TINY = ["--work", "mlp-launch-bound", "--sizes", "tiny", "--ranks", "2"]
SHORT = ["--seconds", "0.01", "--repeats", "1", "--warmup-seconds", "0.01", "--rounds", "2"]


@pytest.fixture
def race_fakes(tmp_path, saved):
    """Returns a function that races fake candidates.

    Keyword arguments map the name of each fake to its times and its failing phase. Returns the rows and the log of phases.
    """

    def race_fakes(
        together: int = 0, rounds: int = 2, building: int = 1, meets: int = 0, **fakes: tuple[list[float], str]
    ) -> tuple[list[dict], list[str]]:
        log, common = tmp_path / "log", {"log": str(tmp_path / "log"), "meets": meets}
        candidates = [
            Candidate({"system": name}, "tests.fake_variant", common | {"name": name, "ms": ms, "fails": fails})
            for name, (ms, fails) in fakes.items()
        ]
        options = TimingOptions(rounds=rounds, together=together, seconds=0.0, repeats=1, warmup_seconds=0.0, timeout=60)

        def save(rows: list[dict]) -> None:
            saved.append(copy.deepcopy(rows))

        race(candidates, save, options, building=building, numbers=count())
        return saved[-1], log.read_text().splitlines()

    return race_fakes


@pytest.fixture
def saved():
    """Row lists that `race_fakes` saved, in order."""
    return []


def test_candidates_build_one_at_a_time_and_odd_rounds_run_in_reverse(race_fakes):
    (a, b), phases = race_fakes(a=([1.0, 3.0], ""), b=([2.0, 2.0], ""))
    assert phases == ["a build", "b build", "a turn", "b turn", "b turn", "a turn", "b finish", "a finish"]
    assert a == {
        "system": "a",
        "device": "none",
        "rounds": [0, 1],
        "repeats_ms": [1.0, 3.0],
        "ms": 2.0,
        "repeats_power_watts": [None, None],
        "power_watts": None,
        "peak_bytes": 1,
    }
    assert rows.ratios(b, a) == [2.0, 2 / 3]


def test_the_first_candidate_joins_every_group_when_memory_is_limited(race_fakes):
    timed, phases = race_fakes(together=2, rounds=1, a=([1.0, 1.5], ""), b=([2.0], ""), c=([3.0], ""))
    assert phases == [
        "a build",
        "b build",
        "a turn",
        "b turn",
        "b finish",
        "c build",
        "c turn",
        "a turn",
        "c finish",
        "a finish",
    ]
    a, b, c = timed
    assert (a["rounds"], b["rounds"], c["rounds"]) == ([0, 1], [0], [1])
    assert rows.ratio(b, a) == "2.000"
    assert rows.ratio(c, a) == "2.000"
    assert rows.ratios(c, b) == [1.5]  # no shared round, so the ratio of the medians


def test_candidates_run_one_after_another_with_together_1(race_fakes):
    timed, phases = race_fakes(together=1, rounds=1, a=([1.0], ""), b=([2.0], ""))
    assert phases == ["a build", "a turn", "a finish", "b build", "b turn", "b finish"]
    assert rows.ratios(timed[1], timed[0]) == [2.0]


def test_candidates_build_in_parallel_with_building_0(race_fakes):
    timed, _ = race_fakes(building=0, rounds=1, meets=3, a=([1.0], ""), b=([2.0], ""), c=([3.0], ""))
    assert [row["ms"] for row in timed] == [1.0, 2.0, 3.0]


def test_builds_are_logged_and_saved_before_the_first_round(race_fakes, saved, capfd):
    race_fakes(rounds=1, a=([1.0], ""), b=([2.0], "build"))
    assert saved[1] == [{"system": "a", "device": "none"}, {"system": "b", "failed": "failed: RuntimeError: cannot build"}]
    lines = capfd.readouterr().err.splitlines()
    for prefix in ("a: ready after ", "b: failed: RuntimeError: cannot build after ", "round 1 of 1 took "):
        assert any(line.startswith(prefix) for line in lines)


@pytest.mark.parametrize("phase", ["build", "turn", "finish"])
def test_a_failed_candidate_stores_its_error_and_the_others_continue(race_fakes, phase):
    (a, b), _ = race_fakes(a=([1.0, 1.0], ""), b=([2.0, 2.0], phase))
    assert b["failed"] == f"failed: RuntimeError: cannot {phase}"
    assert ("ms" in b) == (phase == "finish")
    assert (a["repeats_ms"], a["peak_bytes"]) == ([1.0, 1.0], 1)


def test_one_step_is_timed_and_a_peer_without_gpu_is_listed_as_skipped(tmp_path, capsys):
    flags = ["--presets", "launch-bound", "--sizes", "tiny", "--out", str(tmp_path), *SHORT]
    assert cli.main(["run", "single_gpu", *flags, "--variants", "jgraph", "torch eager", "--categories"]) == 0
    ours, peer = json.loads((tmp_path / "single_gpu.json").read_text())["works"]["launch-bound"]["rows"]
    assert len(ours["repeats_ms"]) == 2
    assert ours["temp_bytes"] > 0
    assert {"forward", "dgrad", "wgrad", "idle"} <= set(ours["categories"])
    assert peer == {"system": "torch", "variant": "eager", "failed": "skipped: needs 1 GPUs, found 0"}
    table = capsys.readouterr().out
    assert "| torch eager | skipped: needs 1 GPUs, found 0 |" in table
    assert "\n| launch-bound | 1 x cpu | 1 failed | " in table


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Returns a function that runs the pipeline benchmark, stores results in `tmp_path` and returns the exit code."""
    monkeypatch.setattr(runner, "RESULTS", tmp_path)

    def run(*flags: str) -> int:
        return cli.main(["run", "pipeline", *TINY, *SHORT, *flags])

    return run


def test_schedules_of_both_engines_are_timed_with_their_actions(run, tmp_path, capsys):
    dispatched = "1f1b engine=dispatch fp8=delayed"
    assert run("--schedules", "aligned", dispatched, "--peers") == 0
    spmd, mpmd_fp8 = json.loads((tmp_path / "pipeline.json").read_text())["works"]["mlp-launch-bound"]["rows"]
    assert [row["runtime"] for row in (spmd, mpmd_fp8)] == ["aligned", "dispatched"]
    for row in (spmd, mpmd_fp8):
        assert row["ms"] == pytest.approx(sum(row["categories"].values()))
        assert {"actions", "bubble", "ends", "permutes", "not told"} == set(row["categories"])
    assert spmd["temp_bytes"] > 0
    assert mpmd_fp8["loss"] != spmd["loss"]
    assert mpmd_fp8["loss"] == pytest.approx(spmd["loss"], rel=0.01)
    assert f"\n| jgraph {dispatched} | " in capsys.readouterr().out


@pytest.mark.parity
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_a_pytorch_schedule_is_timed_on_the_same_work(run, tmp_path):
    assert run("--schedules", "--peers", "ScheduleDualPipeV") == 0  # the first candidate, because no jgraph schedule runs
    (row,) = json.loads((tmp_path / "pipeline.json").read_text())["works"]["mlp-launch-bound"]["rows"]
    assert row["ms"] > 0
    assert row["schedule"] == "ScheduleDualPipeV"


@pytest.fixture
def run_fsdp(tmp_path, monkeypatch):
    """Returns a function that runs the fsdp benchmark, stores results in `tmp_path` and returns the exit code."""
    monkeypatch.setattr(runner, "RESULTS", tmp_path)
    return fsdp_on_two


def fsdp_on_two(*flags: str, work: str = "gpt-1b3") -> int:
    return cli.main(["run", "fsdp", "--work", work, "--sizes", "tiny", "--ranks", "2", *SHORT, *flags])


PLAIN = ("same", "stock tuned nnx flatten off")


@pytest.fixture(scope="module")
def timed_fsdp(tmp_path_factory):
    """Returns the rows of jgraph on two devices, on one and of plain JAX, and the printed page."""
    out = tmp_path_factory.mktemp("fsdp")
    with contextlib.redirect_stdout(io.StringIO()) as page:
        assert fsdp_on_two("--peers", "--plain", *PLAIN, "--out", str(out)) == 0
    return json.loads((out / "fsdp.json").read_text())["works"]["gpt-1b3"]["rows"], page.getvalue()


def test_a_sharded_step_is_timed_with_a_step_on_one_device(timed_fsdp):
    (sharded, alone, *_), page = timed_fsdp
    assert (alone["system"], sharded["system"]) == ("one GPU", "jgraph")
    assert (alone["device"], sharded["device"]) == ("1 x cpu", "2 x cpu")
    assert sharded["ms"] > 0
    assert sharded["skipped"] == 0
    # Each of two devices holds half of the float32 parameters and moments.
    assert sharded["argument_bytes"] == pytest.approx(alone["argument_bytes"] / 2, rel=0.05)
    assert "\n| jgraph | " in page


def test_plain_jax_with_sharded_state_has_the_loss_and_the_memory_of_jgraph(timed_fsdp):
    (ours, _, *plain), page = timed_fsdp
    assert tuple(row["variant"] for row in plain) == PLAIN
    for row in plain:
        assert row["device"] == "2 x cpu"
        assert row["loss"] == pytest.approx(ours["loss"], abs=1e-6)
        # Each device holds half of the parameters and moments, and updates them in place.
        assert row["argument_bytes"] == pytest.approx(ours["argument_bytes"], rel=0.05)
        assert row["alias_bytes"] == pytest.approx(row["argument_bytes"], rel=0.05)
    assert " | jax / row | " in page


def test_the_loop_of_the_readme_is_compared_with_plain_jax(run_here, capsys):
    flags = ["--comparisons", "loop", "--sizes", "tiny", "--rounds", "1", "--seconds", "0.001"]
    plain, ours = run_here("loop", *flags)["loop"]["rows"]
    assert [(row["system"], row["variant"]) for row in (plain, ours)] == [("jax", "same flatten"), ("jgraph", "optax.adamw")]
    relative = re.search("at most (.*) of the largest", ours["difference"])
    assert ours["difference"] == "bitwise equal" or (relative and float(relative[1]) < 1e-4)
    assert f" | {ours['difference']} |" in capsys.readouterr().out


def test_a_start_is_divided_into_phases(run_here):
    variants = ["jgraph", "jgraph num_microbatches=3"]
    works = run_here("startup", "--presets", "launch-bound", "--sizes", "tiny", "--variants", *variants)
    (empty, full, *failed) = works["launch-bound"]["rows"]
    for row in (empty, full):
        assert row["device"] == "1 x cpu"
        phases = [row[key] for key in startup.KEYS.values()]
        assert min(phases) > 0
        assert sum(phases) == pytest.approx(row["first_step_s"])
        assert row["ms"] == 1e3 * row["first_step_s"]
    assert [row["variant"] for row in (empty, full)] == ["empty caches", "full caches"]
    for row in failed:
        assert "must be a divisor of `batch_size` 2" in row["failed"]


def test_processes_are_killed_at_random_steps_and_restarts_are_timed_by_the_output_of_the_run(tmp_path):
    options = restarts.RestartOptions(kills=1, every=3)
    ready = (
        "first step finished 3.0 s after the start: imports and data 1.0, tracing 0.4, XLA 0.6 (0 compiled, 2 loaded from the "
        "compile cache), initial state 0.7, first step 0.3\n"
    )

    def write(name: str, **row: object) -> None:
        (tmp_path / f"{name}.json").write_text(json.dumps(row))

    def lines():
        for rank in range(2):
            write(f"0-{rank}", pid=process.pid)
        yield ready
        for step in range(1, 8):
            yield f"step {step}/12  loss 1.0\n"
        assert process.wait(10) == -9
        write("0-0", end=time.monotonic(), code=75)
        yield "jgraph.train: error: process 0: process 1 is gone\n"
        for rank in range(2):
            write(f"1-{rank}", start=time.monotonic(), compiled=f"{rank} compiled")
        yield "resumed from step 3\n"
        yield ready
        yield "step 4/12  loss 1.0\n"

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        (row,) = restarts.watched(lines(), tmp_path, options)
    assert not unknown_keys(row)
    assert re.fullmatch(r"rank [01] killed at step [1-6]", row["variant"])
    assert (row["codes"], row["lines"], row["resumed"]) == ([75], ["process 0: process 1 is gone"], 3)
    assert 0 < row["exit_s"] <= row["start_s"] <= row["resume_s"] <= row["first_step_s"]
    assert [row[key] for key in startup.KEYS.values()] == [1.0, 0.4, 0.6, 0.7, 0.3]
    assert row["compiled"] == "process 0: 0 compiled; process 1: 1 compiled"


@pytest.mark.long
def test_unrolled_microbatches_need_more_memory_than_a_loop_over_them(run_here):
    flags = ["--presets", "launch-bound", "--batch-size", "4", "--counts", "2", "--fsdp", "2", "--sizes", "tiny", *SHORT]
    work = run_here("microbatches", *flags)["launch-bound, 4 sequences"]
    rows = {row["variant"]: row for row in work["rows"]}
    assert work["device"].startswith("2 x ")
    assert list(rows) == ["2", "2 unrolled", "2 serialized", "2 gathered per pass"]
    assert rows["2"]["temp_bytes"] < rows["2 unrolled"]["temp_bytes"]


def test_words_of_a_plain_jax_variant_combine_and_unknown_words_are_refused():
    step = plain_jax.plain_step(preset("cpu-tiny"), ["same", "nnx", "flatten"])
    params, _ = step.state
    assert isinstance(params, nnx.State)
    assert len(jax.tree.leaves(step.state)) == len(jax.tree.leaves(params)) + 4  # two moments and two counters
    options = plain_jax.xla_options(["stock", "off", "tuned", "xla_gpu_graph_min_graph_size=1"], "gpu")
    assert options["xla_gpu_enable_command_buffer"] == ""
    assert options["xla_gpu_enable_latency_hiding_scheduler"] is True
    assert options["xla_gpu_graph_min_graph_size"] == "1"
    for words in (["plain"], ["same", "stock"], []):
        with pytest.raises(SystemExit, match="unknown variant"):
            plain_jax.xla_options(words, "gpu")


def test_a_soak_stores_memory_growth_and_compares_losses_with_graph_auto(run_fsdp, tmp_path, capsys):
    assert run_fsdp("--soak", "3", "--variant", "graph=full") == 0
    page = capsys.readouterr().out
    assert "| 3 of 3 |" in page
    assert "losses bitwise equal to graph auto" in page
    works = json.loads((tmp_path / "soaks.json").read_text())["works"]
    (row,) = works["fsdp gpt-1b3, graph=full, graph full"]["rows"]
    assert (row["variant"], row["done"], row["skipped"], row["first_differs"]) == ("graph=full", 3, 0, None)
    assert row["slowest_ms"] >= row["ms"] > 0
    assert row["host_bytes"] > 0


def test_a_soak_skips_the_comparison_with_soak_against_nothing(run_fsdp, monkeypatch):
    started: list[Candidate] = []

    def run_once(candidate: Candidate, **_: object) -> dict:
        started.append(candidate)
        return {"system": "jgraph", "losses": [1.0]}

    monkeypatch.setattr(runner, "run_once", run_once)
    assert run_fsdp("--soak", "1", "--variant", "graph=full", "--soak-against", "nothing") == 0
    assert len(started) == 1


def test_a_tiny_work_keeps_the_architecture_of_its_preset():
    tiny, full = (fsdp.config_of("llama3-8b", 2, fsdp.Options(sizes=sizes)).model for sizes in ("tiny", "full"))
    for name in ("mlp", "head", "rope_scaling", "rope_theta"):
        assert getattr(tiny, name) == getattr(full, name)
    assert (tiny.num_kv_heads, tiny.num_heads) == (1, 2)


def test_loss_difference_reports_the_maximum_and_the_first_differing_step():
    assert runner.loss_difference([3.0, 2.0], [3.0, 2.0]) == {"differs": 0.0, "first_differs": None}
    assert runner.loss_difference([3.0, 2.0, 1.0], [3.0, 2.5, 1.25]) == {"differs": 0.5, "first_differs": 1}
    assert np.isnan(runner.loss_difference([3.0, float("nan"), 1.0], [3.0, 2.0, 2.0])["differs"])


@pytest.mark.parity
@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
def test_pytorch_variants_of_sharded_training_run_in_rounds_of_their_placement(run_fsdp, tmp_path):
    peers = ["eager:whole:graph", "eager:float8:reshard"]
    flags = ["--first", "fp8=delayed", "--variant", "reshard=yes", "--one-gpu", "no"]
    assert run_fsdp("--plain", "--peers", *peers, *flags, work="llama3-8b") == 0
    timed = json.loads((tmp_path / "fsdp.json").read_text())["works"]["llama3-8b"]["rows"]
    assert not any("failed" in row for row in timed)
    names = ["fp8=delayed", "", peers[0], "reshard=yes", peers[1]]
    by_name = dict(zip(names, timed, strict=True))
    assert [row["variant"] for row in timed] == names
    assert len(rows.ratios(by_name["eager:whole:graph"], by_name["fp8=delayed"])) == 2
    assert len(rows.ratios(by_name["eager:float8:reshard"], by_name["reshard=yes"])) == 2
    assert not set(by_name["eager:float8:reshard"]["rounds"]) & set(
        by_name[""]["rounds"]
    )  # resharded and kept parameters share no round
    losses = {name: row["loss"] for name, row in by_name.items()}
    assert list(losses.values()) == pytest.approx([np.log(96)] * 5, rel=0.05)
    assert losses["fp8=delayed"] != losses[""]
    assert losses["eager:float8:reshard"] != losses["eager:whole:graph"]


def test_the_variant_name_selects_the_fp8_recipe():
    (work,) = fp8.BENCHMARK.works(fp8.Options(presets=("gpt-moe",), variants=(*fp8.VARIANTS[:3], "jgraph fp8=current:e4m3")))
    configs = [candidate.request["config"] for candidate in work.groups[0]]
    assert [config["precision"] for config in configs] == ["fp8", "fp8", "bf16", "fp8"]
    named = [(config["fp8"]["recipe"], config["fp8"]["format"]) for config in configs if config["precision"] == "fp8"]
    assert named == [("delayed", "hybrid"), ("current", "hybrid"), ("current", "e4m3")]


def test_a_variant_sets_jgraph_settings_and_xla_options():
    config = fsdp.config_of("gpt-7b", 4, fsdp.Options())
    varied = works.vary(config, "reshard=yes graph=full xla_an_option=a=b")
    assert (config.parallel.fsdp, config.input.batch_size, config.parallel.gather_per) == (4, 8, "step")
    assert (varied.compile.graph, varied.parallel.gather_per) == ("full", "pass")
    assert works.vary(config, "fp8=delayed").fp8.recipe == "delayed"
    experts = works.vary(fsdp.config_of("gpt-moe", 4, fsdp.Options()), "layout=ep num_microbatches=2 capacity=1.75")
    assert (experts.parallel.fsdp, experts.parallel.ep, experts.input.num_microbatches, experts.model.moe.capacity) == (
        4,
        4,
        2,
        1.75,
    )
    assert works.vary(config, "layout=tp tensor_overlap=none").model.tensor_overlap == "none"
    for axis in ("tp", "cp", "pp"):
        split = works.vary(config, f"layout={axis}").parallel
        assert (getattr(split, axis), split.fsdp) == (config.parallel.fsdp, 1)
    decoupled = works.vary(config, "grads=bfloat16")
    assert (decoupled.dtypes.main_params_dtype, decoupled.dtypes.read_dtype, decoupled.dtypes.decoupled_grad) == (
        "float32",
        "bfloat16",
        True,
    )
    assert varied.compile.xla_options == (*config.compile.xla_options, "xla_an_option=a=b")
    options = works.vary(config, "fp8=delayed:hybrid:fast head_precision=fp8 first_moment_dtype=bfloat16 seq_len=4096")
    assert (options.fp8.accumulation, options.model.head_precision) == ("fast", "fp8")
    assert (options.optimizer.first_moment_dtype, options.input.seq_len) == ("bfloat16", 4096)


@pytest.mark.parametrize("setting", ["reshard=maybe", "layout=sp", "speed=high", "seq_len=long", "graph=half"])
def test_an_unknown_setting_of_a_variant_is_named(setting):
    with pytest.raises(SystemExit, match=setting):
        works.vary(fsdp.config_of("gpt-7b", 4, fsdp.Options()), f"fp8=current {setting}")


@pytest.fixture
def cells_of():
    """Returns a function that formats the table of GPT 1.3B on four GPUs.

    Its argument maps system and variant to milliseconds. It returns one dict of cells per row, by heading, and the config.
    """

    def cells_of(times: dict[tuple[str, str], float]) -> tuple[list[dict[str, str]], dict]:
        config = fsdp.config_of("gpt-1b3", 4, fsdp.Options()).to_dict()
        timed = [
            {"system": system, "variant": variant, "ranks": 1 if system == "one GPU" else 4, "ms": ms, "repeats_ms": [ms]}
            for (system, variant), ms in times.items()
        ]
        timed = [row | {"device": f"{row['ranks']} x NVIDIA H200"} for row in timed]
        section = fsdp.section("gpt-1b3", {"config": config, "ranks": 4, "rows": timed})
        return [{head: cell(row) for head, cell in section.columns.items()} for row in timed], config

    return cells_of


def test_the_fsdp_table_has_ratio_scaling_throughput_and_mfu(cells_of):
    (torch, alone, ours), config = cells_of({("torch", "compile"): 110.0, ("one GPU", ""): 95.0, ("jgraph", ""): 100.0})
    assert (torch["torch / row"], alone["torch / row"], ours["torch / row"]) == ("", "", "1.100")
    assert ours["throughput / 4 x one GPU"] == "95.0%"
    assert ours["tokens/s"] == f"{8 * 2048 * 4 / 0.1:,.0f}"
    flops = step_flops(config) / 4
    assert ours["MFU"] == f"{flops / 0.1 / 989e12:.1%}"


def test_resharded_pytorch_is_compared_only_with_resharded_jgraph(cells_of):
    times = {("torch", "compile:reshard"): 110.0, ("jgraph", ""): 50.0, ("jgraph", "reshard=yes xla_a=1"): 100.0}
    (_, kept, resharded), _ = cells_of(times)
    assert (kept["torch / row"], resharded["torch / row"]) == ("", "1.100")


def test_replicated_pytorch_is_compared_with_replicated_and_kept_parameters(cells_of):
    times = {("torch", "compile:graph"): 60.0, ("torch", "compile"): 90.0, ("jgraph", ""): 50.0, ("jgraph", "layout=dp"): 40.0}
    (*_, kept, replicated), _ = cells_of(times)
    assert (kept["torch / row"], replicated["torch / row"]) == ("1.200", "1.500")
    resharded = {("torch", "compile:graph"): 60.0, ("jgraph", "reshard=yes"): 50.0}
    assert cells_of(resharded)[0][1]["torch / row"] == ""


@pytest.fixture
def run_here(tmp_path, monkeypatch):
    """Returns a function that runs a benchmark and returns its results by work."""
    monkeypatch.setattr(runner, "RESULTS", tmp_path)

    def run(name: str, *flags: str) -> dict:
        assert cli.main(["run", name, *flags]) == 0
        (file,) = tmp_path.glob("*.json")
        return json.loads(file.read_text())["works"]

    return run


def write_measured(folder, rows):
    """Writes a results file of the launch-bound step, with a row for each variant."""
    config = preset("launch-bound").to_dict()
    facts = {"environment": {"date": "2026-11-27T10:00:00+00:00", "revision": "r"}, "device": "1 x NVIDIA H200", "ranks": 1}
    given = {"system": "jgraph", "argument_bytes": 60, "temp_bytes": 40, "output_bytes": 50, "alias_bytes": 50, "ms": 1.0}
    found = [given | {"variant": name} | row for name, row in rows.items()]
    works = {"launch-bound": facts | {"config": config, "rows": found}}
    (folder / "single_gpu.json").write_text(json.dumps({"works": works}))


def test_plans_stand_beside_the_measured_steps_of_the_stored_results(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "RESULTS", tmp_path)
    write_measured(tmp_path, {"remat=layer": {}, "xla_option=1": {}, "": {"system": "jax"}, "length=4096": {}})
    assert cli.main(["run", "plans", "--groups", "later", "--out", str(tmp_path / "out")]) == 0
    works = json.loads((tmp_path / "out/plans.json").read_text())["works"]
    (row,) = works["later"]["rows"]
    assert (row["variant"], row["device"]) == ("launch-bound, 2 x 128, remat layer", "1 x H200")
    assert (row["measured_bytes"], row["state_bytes"], row["measured_ms"]) == (100, 60, 1.0)
    assert row["planned_bytes"] > row["planned_state_bytes"] > 1e8
    assert row["fits"]


def test_the_summary_of_plans_counts_steps_that_need_more_than_the_margin():
    row = {"kind": "LoRA", "planned_bytes": 100, "margin": 0.1, "planned_ms": 2.0, "measured_ms": 4.0}
    rows = [row | {"measured_bytes": size} for size in (100, 110, 125)]
    (_, *cells), *_ = plans.summary(rows)
    assert cells == ["3", "9.1%", "-20.0%", "1", "0.50", "0.50 to 0.50"]


def test_the_newest_memory_of_a_configuration_keeps_its_newest_time():
    step = plans.Measured(("a", "", ""), preset("launch-bound"), "h200", "2026-11-01", 1, 2, 3.0)
    later = dataclasses.replace(step, date="2026-11-02", peak=5, ms=None)
    assert plans.newest([later, step]) == [dataclasses.replace(later, ms=3.0)]


def test_chunks_of_an_earlier_loss_ran_at_once_on_several_gpus():
    config = preset("gpt-124m").changed(seq_len=1024, batch_size=16)  # two chunks of 8192 tokens on one GPU
    step = plans.Measured(("a", "", ""), config, "h200", "2026-11-01", 1, 2, 3.0)
    sharded = dataclasses.replace(step, config=config.changed(fsdp=2, batch_size=32))
    small = dataclasses.replace(step, config=config.changed(fsdp=2))
    again = dataclasses.replace(sharded, date="2026-12-01")
    groups = [plans.group_of(each, ()) for each in (step, sharded, small, again)]
    assert groups == ["later", "earlier loss", "later", "later"]


@pytest.mark.long
@pytest.mark.once
def test_stored_plans_are_those_of_the_present_rules_and_no_step_needs_more_than_the_margin():
    """Earlier losses held more logits."""
    stored = json.loads((runner.RESULTS / "plans.json").read_text())["works"]
    for work in plans.BENCHMARK.works(plans.PlanOptions(groups=("chosen", "later"))):
        rows = {(row["variant"], row["device"]): row for row in stored[work.name]["rows"]}
        assert len(rows) >= 15
        for row in work.rows:
            before = rows[row["variant"], row["device"]]
            assert row["planned_state_bytes"] == pytest.approx(row["state_bytes"], rel=0.01)
            assert row["planned_bytes"] == pytest.approx(before["planned_bytes"], rel=0.02)
            assert plans.is_covered(row), row["variant"]


def test_the_memory_of_a_compiled_step_is_stored_with_its_configuration(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "RESULTS", tmp_path)
    small = preset("cpu-tiny").changed(model=dataclasses.replace(preset("cpu-tiny").model, num_layers=1, d_model=32, d_ff=64))
    step = plans.Measured(("a", "", ""), small, "h200", "2026-11-01", 1, 2, 3.0)
    monkeypatch.setattr(step_memory, "newest", lambda steps: [step])
    assert cli.main(["run", "step_memory"]) == 0
    (found,) = plans.measured()
    assert found.config.changed(graph="auto") == small.changed(graph="auto")
    assert found.peak > found.state > 0
    assert found.ms is None


@pytest.mark.parity
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_tensor_and_context_parallelism_are_timed_with_pytorch(run_here, capsys):
    variants = {"gpt-1b3-tp": "eager:sequence", "gpt-1b3-cp": "eager:replicate:alltoall"}
    flags = ["--tensor-peers", variants["gpt-1b3-tp"], "--context-peers", variants["gpt-1b3-cp"]]
    works = run_here("tensor_context", "--sizes", "tiny", "--ranks", "2", *SHORT, *flags)
    found = {work: {row["system"]: row for row in result["rows"]} for work, result in works.items()}
    assert [[*systems] for systems in found.values()] == [["jgraph", "torch", "jgraph fsdp"], ["jgraph", "torch"]]
    for work, timed in found.items():
        assert not [row["failed"] for row in timed.values() if "failed" in row]
        assert (timed["torch"]["variant"], timed["torch"]["device"]) == (variants[work], "2 x cpu")
        assert np.isfinite([row["ms"] for row in timed.values()]).all()
        assert [row["loss"] for row in timed.values()] == pytest.approx([np.log(96)] * len(timed), rel=0.05)
    assert found["gpt-1b3-tp"]["jgraph fsdp"]["loss"] == pytest.approx(found["gpt-1b3-tp"]["jgraph"]["loss"], rel=1e-5)
    # Each device holds half of the matrices, or, with context parallelism, all of them.
    split, whole = (found[work]["jgraph"]["argument_bytes"] for work in variants)
    assert split == pytest.approx(whole / 2, rel=0.1)
    assert " | exposed collectives, ms | " in capsys.readouterr().out


def test_works_of_tensor_and_context_parallelism_have_the_tokens_of_the_fsdp_benchmark():
    options = tensor_context.Options()
    configs = [tensor_context.config_of(work, 2, options) for work in options.work]
    shapes = [(one.parallel.tp, one.parallel.cp, one.input.batch_size, one.input.seq_len) for one in configs]
    assert shapes == [(2, 1, 16, 2048), (1, 2, 1, 32768)]
    sharded = fsdp.config_of("gpt-1b3", 2, fsdp.Options())
    assert {one.input.tokens_per_step for one in (*configs, sharded)} == {32768}


def test_pytorch_variants_of_tensor_and_context_parallelism_select_the_partitioning():
    options = tensor_context.Options(ranks=2)
    tensor, context = (work.groups[0] for work in tensor_context.BENCHMARK.works(options))
    requests = {one.labels["variant"]: one.request for one in (*tensor, *context) if one.labels["system"] == "torch"}
    assert requests["compile:async"]["pipelined"]
    assert [requests[name]["split"] for name in ("compile:sequence", "compile:async")] == ["sequence", "batch"]
    assert [requests[name]["params"] for name in ("compile:cudnn", "compile:replicate:cudnn")] == ["sharded", "replicated"]
    assert tensor[-1].labels["variant"] == "compile:async"  # may end by its timeout
    assert {one.labels["system"] for one in context} == {"jgraph", "torch"}
    wrong = dataclasses.replace(options, tensor_peers=("compile:replicate",))
    with pytest.raises(SystemExit, match="--tensor-peers has the unknown variant compile:replicate"):
        list(tensor_context.BENCHMARK.works(wrong))


def test_the_table_of_tensor_parallelism_has_exposed_collectives_and_the_ratio_to_sharded_state():
    config = tensor_context.config_of("gpt-1b3-tp", 2, tensor_context.Options()).to_dict()
    times = {("jgraph", ""): 100.0, ("torch", "compile"): 120.0, ("torch", "eager"): 150.0, ("jgraph fsdp", ""): 80.0}
    timed = [
        {"system": system, "variant": variant, "ms": ms, "repeats_ms": [ms], "device": "2 x NVIDIA H200"}
        for (system, variant), ms in times.items()
    ]
    timed[0]["categories"] = {"forward": 60.0, "all-gather": 7.0, "reduce-scatter": 5.5, "idle": 1.0}
    section = tensor_context.section("gpt-1b3-tp", {"config": config, "ranks": 2, "rows": timed})
    ours, torch, _, sharded = ({head: cell(row) for head, cell in section.columns.items()} for row in timed)
    assert (ours["torch / row"], torch["torch / row"], sharded["torch / row"]) == ("1.200", "", "1.500")
    assert (ours["row / jgraph fsdp"], sharded["row / jgraph fsdp"]) == ("1.250", "")
    assert (ours["exposed collectives, ms"], torch["exposed collectives, ms"]) == ("12.50", "")
    assert ours["tokens/s"] == f"{32768 / 0.1:,.0f}"
    assert ours["MFU"] == f"{step_flops(config) / 2 / 0.1 / 989e12:.1%}"


def test_the_page_of_benchmarks_compares_tensor_and_context_parallelism_with_pytorch():
    config = {"batch_size": 1, "seq_len": 32768}
    timed = [
        {"system": system, "variant": variant, "ms": ms, "repeats_ms": [ms]}
        for system, variant, ms in (("jgraph", "", 2.0), ("torch", "compile:cudnn", 3.0), ("jgraph fsdp", "", 1.0))
    ]
    result = {"rows": timed, "config": config, "ranks": 2, "device": "2 GPUs"}
    *_, line = readme.multi_gpu_table({"tensor_context2": {"gpt-1b3-cp": result}})
    assert "tensor_context, gpt-1b3-cp, 1x32768 tokens" in line
    assert " | 2.00 (default) | 1.50" in line


def test_loss_curves_are_compared_with_the_first_run(run_here, tmp_path, capsys):
    works = run_here("convergence", "--runs", *write_runs(tmp_path, auto=[3.0, 2.0], off=[3.5, 1.75]), "--draw", str(tmp_path))
    assert works["tiny"]["device"] == "X"
    assert "| off | auto | bf16 | 1.00 | 0, 0 | 1.7500 | 1.7500 | " in (page := capsys.readouterr().out)
    assert " | +0.1250, 0.3750, 0.5000 |" in page
    drawn = (tmp_path / "convergence.svg").read_text()
    assert "prefers-color-scheme: dark" in drawn
    assert "#000000" not in drawn.partition("</style>\n<rect")[2]


def test_an_fp8_run_may_differ_by_twice_the_noise_of_the_baseline_runs(run_here, tmp_path, capsys):
    losses = {"bf16": [9.0, 1.0, 1.0], "again": [9.0, 1.0, 1.02], "current": [9.0, 1.02, 1.02], "delayed": [9.0, 1.05, None]}
    runs = write_runs(tmp_path, **losses, stopped=[9.0, 1.0])
    run_here("convergence", "--runs", *runs, "--name", "convergence_fp8", "--draw", str(tmp_path))
    page = capsys.readouterr().out
    # Losses are logged every 150 steps, so the last 200 steps have two entries. Their means are 1, 1.01 and 1.02.
    for name, verdict in (
        ("bf16", ""),
        ("again", ""),
        ("current", "+0.0150, within 0.0200"),
        ("delayed", "+nan, exceeds 0.0200"),
    ):
        (line,) = (line for line in page.splitlines() if line.startswith(f"| {name} | "))
        assert line.split(" | ")[-2] == verdict
        assert line.split(" | ")[4] == ("1, 1" if name == "delayed" else "0, 0")
    assert "+nan, exceeds 0.0200" in page.partition("| stopped ")[2]
    assert "Baseline: bf16, again. Their means over the last 200 steps differ by 0.0100." in page
    assert (tmp_path / "convergence_fp8.svg").stat().st_size > 0


def write_runs(folder, **losses):
    """Creates run directories with losses logged every 150 steps. Returns the values of `--runs`."""
    for name, values in losses.items():
        (folder / name).mkdir()
        fp8 = {"precision": "fp8", "fp8": {"recipe": name}} if name not in ("auto", "off", "bf16", "again") else {}
        config = {"graph": "auto", "preset": "tiny", "versions": {"device": "X"}, **fp8}
        (folder / name / "config.json").write_text(json.dumps(config))
        entries = [
            {"step": 150 * i, "loss": loss, "step_time_ms": 1.0, "eval_loss": loss or 9.0, "skipped": int(loss is None)}
            for i, loss in enumerate(values)
        ]
        (folder / name / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return [f"{name}={folder / name}" for name in losses]


def test_the_split_backward_is_timed_with_jax_vjp(run_here, monkeypatch):
    monkeypatch.setattr(split_backward, "VARIANTS", ("jax.vjp, one program", "split, three programs"))
    (result,) = run_here("split_backward", "--sizes", "tiny", *SHORT).values()
    assert [row["system"] for row in result["rows"]] == ["jax", "jgraph"]
    assert all(row["ms"] > 0 and len(row["repeats_ms"]) == 2 for row in result["rows"])


def test_the_cast_is_timed_with_the_bytes_that_it_moves(run_here):
    (result,) = run_here("kernels", "--sizes", "tiny", "--implementations", "xla", *SHORT).values()
    (row,) = result["rows"]
    assert row["moved_bytes"] == kernels.KERNELS * 256 * 128 * 4  # reads bfloat16, and writes FP8 twice
    assert row["ms"] > 0


def test_all_variants_of_the_split_backward_add_the_gradient():
    stage, (params,), x, dy = gpt_blocks(split_backward.SIZES["tiny"]["tiny"] | {"num_blocks": 1})

    @jax.jit
    @jax.grad
    def gradient(params):
        return jnp.vdot(stage(params, x).astype(jnp.float32), dy.astype(jnp.float32))

    expected = jax.tree.leaves(gradient(params))
    for variant in split_backward.VARIANTS:
        accumulate = split_backward.program(variant, stage, params, x, dy)
        found = jax.tree.leaves(accumulate(jax.tree.map(lambda leaf: jnp.ones(leaf.shape, jnp.float32), params)))
        for total, of_leaf in zip(found, expected, strict=True):  # bfloat16 has 8 bits
            np.testing.assert_allclose(total - 1, of_leaf, atol=0.02 * np.abs(of_leaf).max(), err_msg=variant)


def test_generation_is_timed_with_plain_jax_and_a_pytorch_loop(run_here):
    peers = ["loop"] if importlib.util.find_spec("torch") else []
    flags = ["--models", "gpt-1b3", "--plain", "scan", "--peers", *peers]
    (result,) = run_here("decode", "--sizes", "tiny", *flags, *SHORT).values()
    names = [("jgraph", ""), ("jax", "scan"), *(("torch", peer) for peer in peers)]
    assert [(row["system"], row["variant"]) for row in result["rows"]] == names
    assert all(row["ms"] > 0 for row in result["rows"])


@pytest.mark.parametrize("name", ["gpt-1b3", "llama-1b3"])
def test_plain_jax_generates_the_tokens_of_jgraph(name):
    config = dataclasses.replace(decode.model_config(name, "tiny"), head="untied")  # a tied head repeats the last token
    model = jgraph.functional(lambda: GPT(config, rngs=nnx.Rngs(0)))
    params = model.init()[0]
    prompt = np.arange(8)
    (tokens,) = jgraph.generate(model, params, [prompt], max_tokens=16, temperature=0)
    assert len(set(tokens.tolist())) > 4
    for variant in ("scan", "loop"):
        np.testing.assert_array_equal(plain_jax_decode.generator(config, params, prompt, 16, variant)(), tokens)


def test_forward_dgrad_and_wgrad_of_grouped_matmuls_are_timed_and_a_missing_transformer_engine_is_an_error_of_its_row(run_here):
    pytest.importorskip("torch")
    works = run_here("grouped", "--sizes", "tiny", "--groups", "skewed", "--peers", "torch", "te bf16", *SHORT)
    (result,) = works.values()
    assert (sum(result["size"]["groups"]), len(set(result["size"]["groups"]))) == (64, 4)
    assert [(row["system"], row["variant"]) for row in result["rows"]] == [("jgraph", ""), ("torch", ""), ("torch", "te bf16")]
    *timed, engine = result["rows"]
    for row in timed:
        assert row["ms"] == pytest.approx(
            sum(row[f"{leg}_ms"] for leg in grouped.LEGS), rel=0.5
        )  # a sum of medians is not the median of the sum
    if not importlib.util.find_spec("transformer_engine"):
        assert engine["failed"] == "failed: ModuleNotFoundError: No module named 'transformer_engine'"
    assert readme.grouped_table(works.items())[-1].count(" to ") == len(grouped.LEGS)


def test_mixture_of_experts_layers_are_timed_without_the_model(run_here):
    pytest.importorskip("torch")
    (result,) = run_here("moe", "--sizes", "tiny", "--work", "qwen3-30b-a3b-layers", "--peers", "eager", *SHORT).values()
    assert [row["system"] for row in result["rows"]] == ["jgraph", "torch"]
    assert all(row["ms"] > 0 for row in result["rows"])


def test_layer_flops_exclude_the_head():
    config = preset("qwen3-30b-a3b").to_dict() | {"batch_size": 1, "seq_len": 1}
    whole, layers = (moe.flops(config, head=head) / 6 for head in (True, False))
    # Qwen3 30B A3B has 3.35e9 active parameters. Embedding and head have 0.31e9 each.
    assert whole - 48 * 32 * 128 == pytest.approx(3.35e9 - 2048 * 151_936, rel=0.01)
    assert whole - layers == 2048 * 151_936


def test_words_of_a_transformer_engine_variant_combine():
    assert parse_variant("te bf16") == TEVariant(recipe="bf16")
    combined = "torch te current fp8-attention bf16-params + CUDA graph"
    assert parse_variant(combined) == TEVariant(recipe="current", params="bfloat16", attention="fp8", graph="step")
    grouped = TEVariant(recipe="bf16", grouped="cutlass", graph="attention")
    assert parse_variant("te bf16 cutlass graphed-attention") == grouped


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("te", "unknown variant 'te'"),
        ("te mxfp8", "te bf16|delayed|current|blockwise"),
        ("te current fp8_params", "bf16-params, fp8-params"),
        ("te current bf16-params fp8-params", "one kind of parameters"),
        ("te bf16 fp8-params", "fp8-params needs the recipe delayed or current or blockwise"),
        ("te blockwise fp8-attention", "fp8-attention needs the recipe delayed or current"),
        ("te current cutlass", "cutlass needs the recipe bf16"),
        ("te current + CUDA graph twice", "unknown variant"),
    ],
)
def test_a_wrong_transformer_engine_variant_is_refused(name, reason):
    with pytest.raises(SystemExit, match=re.escape(reason)):
        parse_variant(name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("te delayed + CUDA graph", "no CUDA graph"),
        ("te bf16 cutlass", "no grouped matmul"),
        ("te blockwise fp8-params", "FP8 only with delayed or current"),
    ],
)
def test_fully_shard_refuses_a_variant_of_transformer_engine_for_one_gpu(name, reason):
    with pytest.raises(SystemExit, match=re.escape(reason)):
        parse_sharded_variant(name)


def test_a_sharded_variant_of_transformer_engine_is_timed_with_its_placement():
    peers = ("compile", "te delayed fp8-params", "te delayed:reshard")
    (work,) = fsdp.works(fsdp.Options(work=("llama3-8b",), plain=(), peers=peers, one_gpu="no", ranks=2))
    (_, *kept), resharded = work.groups
    requests = [candidate.request for candidate in (*kept, *resharded)]
    assert [(request["te"], request["reshard"], request["compile"]) for request in requests] == [
        ("", False, True),
        ("te delayed fp8-params", False, False),
        ("te delayed", True, False),
    ]


@pytest.mark.parametrize(
    ("work", "peer"), [("gpt-1b3", "te delayed:float8"), ("gpt-1b3", "te delayed fp8-params:graph"), ("gpt-moe", "te delayed")]
)
def test_sharded_transformer_engine_takes_dense_works_and_one_suffix(work, peer):
    options = fsdp.Options()
    with pytest.raises(SystemExit, match=f"--peers has '{peer}': Transformer Engine needs a dense work"):
        fsdp.torch_candidate(peer, fsdp.config_of(work, 2, options), options)


def test_default_variants_of_transformer_engine_are_known_and_have_a_program():
    recipes = {fp8: {"delayed", "current", "blockwise"}, single_gpu: {"bf16"}, moe: {"bf16"}, grouped: {"bf16", "current"}}
    for benchmark, expected in recipes.items():
        candidates = [one for work in benchmark.BENCHMARK.works(benchmark.Options()) for one in work.groups[0]]
        engine = [one for one in candidates if is_te(one.labels["variant"])]
        assert {parse_variant(one.request["variant"]).recipe for one in engine} == expected
        assert {one.labels["system"] for one in engine} == {"torch"}
        assert all(importlib.util.find_spec(one.module) for one in engine)


def test_grouped_matmuls_in_fp8_are_not_compared_with_bfloat16():
    def row(system, variant, ms):
        return {"system": system, "variant": variant, "ms": 4 * ms} | {f"{leg}_ms": ms for leg in grouped.LEGS}

    timed = [row("jgraph", "", 2.0), row("torch", "", 4.0), row("torch", "te bf16", 3.0), row("torch", "te current", 1.0)]
    *_, line = readme.grouped_table([("work", {"rows": timed, "size": {"shape": (8, 8, 8, 2)}, "device": "a GPU"})])
    assert line.count(", 1.50 ") == len(grouped.LEGS)


def test_transformer_engine_has_a_column_and_counts_as_pytorch():
    rows_of = [
        ("jgraph", "fp8=delayed", 2.0),
        ("torch", "float8 tensorwise compile", 4.0),
        ("torch", "te delayed + CUDA graph", 3.0),
        ("torch", "te bf16 + CUDA graph", 5.0),
    ]
    result = {
        "rows": [{"system": system, "variant": variant, "ms": ms, "repeats_ms": [ms]} for system, variant, ms in rows_of],
        "config": {"batch_size": 1, "seq_len": 8},
        "device": "a GPU",
    }
    heads, _, line = readme.fp8_table([("gpt", result)])
    cells = dict(zip(heads.split(" | "), line.split(" | "), strict=True))
    assert (cells["torchao float8"], cells["Transformer Engine FP8"], cells["torch bf16"]) == ("4.00", "3.00", "5.00")
    assert cells["fastest PyTorch / jgraph FP8"] == "1.50 (te delayed + CUDA graph; fastest of 3)"


def test_adapters_are_trained_on_two_devices(run_here, capsys):
    flags = ["--preset", "llama3-8b", "--ranks", "2", "--sizes", "tiny", "--variants", "jgraph", "jgraph fp8=delayed:e4m3"]
    (result,) = run_here("finetune", *flags, *SHORT).values()
    ours, in_fp8 = result["rows"]
    assert (result["ranks"], ours["device"]) == (2, "2 x cpu")
    assert ours["loss"] != in_fp8["loss"]
    assert ours["loss"] == pytest.approx(in_fp8["loss"], rel=0.01)
    assert "\n## llama3-8b, 2x32 tokens, LoRA of rank 16, 2 ranks\n" in capsys.readouterr().out


@pytest.mark.parametrize(("ranks", "module", "processes"), [(1, "peft_lora", 0), (2, "peft_fsdp", 2)])
def test_the_peer_of_fine_tuning_has_one_process_per_gpu(ranks, module, processes):
    variants = ("jgraph", "jgraph fp8=delayed:e4m3 remat=layer", "peft compile cudnn")
    (work,) = finetune.BENCHMARK.works(finetune.Options(ranks=ranks, batch_size=4, seq_len=64, variants=variants))
    *ours, peer = work.groups[0]
    assert work.name == "qwen3-0.6b, 4x64 tokens"
    assert (peer.module, peer.ranks, peer.gpus) == (f"benchmarks.peers.{module}", processes, ranks)
    assert (peer.labels, peer.request["variant"]) == ({"system": "torch", "variant": variants[2]}, "compile cudnn")
    configs = [candidate.request["config"] for candidate in ours]
    assert [(config["precision"], config["remat"]) for config in configs] == [("bf16", "nothing"), ("fp8", "layer")]
    assert [config["fsdp"] for config in (*configs, peer.request["config"])] == [ranks] * 3


def test_results_of_fine_tuning_appear_on_the_benchmarks_page(tmp_path, monkeypatch):
    for file in runner.RESULTS.glob("*.json"):
        if not file.stem.startswith("finetune"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(runner, "RESULTS", tmp_path)
    assert "## Fine-tuning" not in readme.page_tables()
    times = [
        ("jgraph", "", 2.0),
        ("jgraph", "fp8=delayed:e4m3", 1.0),
        ("torch", "peft eager", 4.0),
        ("torch", "peft compile", 3.0),
    ]
    timed = [{"system": system, "variant": name, "ms": ms, "repeats_ms": [ms]} for system, name, ms in times]
    for ranks in (1, 2):
        (work,) = finetune.BENCHMARK.works(finetune.Options(ranks=ranks))
        name = "finetune" + "2" * (ranks > 1)
        results = runner.Results(finetune.Options(name=name, out=str(tmp_path)), finetune.BENCHMARK.draw)
        results.begin(work.name, **work.facts)
        results.put(work.name, [row | {"device": f"{ranks} x NVIDIA H200"} for row in timed])
        assert readme.results_page(tmp_path / f"{name}.md") == (tmp_path / f"{name}.md").read_text()
    _, _, section = readme.page_tables().partition("## Fine-tuning with LoRA\n")
    lines = [line.split(" | ") for line in section.partition("\n## ")[0].splitlines() if line.startswith("| qwen3-0.6b")]
    assert [(cells[0], cells[1], cells[4]) for cells in lines] == [
        ("| qwen3-0.6b, 8x2048 tokens" + text, f"{ranks} x NVIDIA H200", ratio)
        for ranks in (1, 2)
        for text, ratio in (("", "1.50"), (", jgraph in FP8", "3.00"))
    ]
    assert "[finetune2](../benchmarks/results/finetune2.md)" in section
