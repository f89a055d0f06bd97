"""Reports of recordings from H200 GPUs and from this machine are consistent."""

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from jgraph.errors import ConfigError, ProfileError
from jgraph.profile import report
from jgraph.profile.__main__ import main
from jgraph.profile.trace import read
from jgraph.train.config import TrainConfig
from tests import tiny
from tests.profile.checks import check, check_time
from tests.profile.recordings import NAMES

pytestmark = pytest.mark.long

COMPUTE = {"forward", "dgrad", "wgrad", "attention", "loss", "optimizer", "copies"}


@pytest.fixture(scope="module")
def reports(recorded):
    return {name: report.of_run(recorded(name)) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_the_time_of_an_h200_step_is_attributed_once(name, reports):
    check(reports[name])


@pytest.mark.parametrize(
    ("name", "collectives"),
    [("one", set()), ("pipeline", {"transfer", "all-reduce"}), ("sharded", {"all-gather", "reduce-scatter", "all-reduce"})],
)
def test_a_step_has_exactly_the_expected_categories(name, collectives, reports):
    recompute = {"recompute"} if name == "pipeline" else set()
    for rank in reports[name]["uncaptured"]["ranks"]:
        assert set(rank["categories"]) - {"other", "control"} == COMPUTE | collectives | recompute


def test_a_captured_step_is_one_launch(reports):
    found = reports["one"]["captured"]
    assert (found["launches"], found["records"]) == (1, 0)
    assert len(found["steps_ms"]) == 2
    assert found["busy_ms"] + found["idle_ms"] == pytest.approx(found["step_ms"])
    assert 0 < found["launch_ms"] < found["step_ms"]


def test_a_pipeline_has_the_actions_of_its_schedule(reports):
    found = reports["pipeline"]["pipeline"]
    of_rank = {(action["kind"], action["microbatch"]) for action in found["actions"] if action["rank"] == 2}
    assert of_rank == {(kind, m) for kind in ("forward", "dgrad", "wgrad") for m in range(4)}
    by_key = {(action["rank"], action["kind"], action["microbatch"]): action for action in found["actions"]}
    for action in by_key.values():
        took = action["end_ms"] - action["start_ms"]
        assert took > 0
    for m in range(4):  # a microbatch goes from rank to rank, and back
        starts = [by_key[rank, "forward", m]["start_ms"] for rank in range(4)]
        starts += [by_key[rank, "dgrad", m]["start_ms"] for rank in (3, 2, 1, 0)]
        assert starts == sorted(starts)


def test_rooflines_are_below_the_measured_times(reports):
    known = [group for group in reports["one"]["groups"] if group["roofline_ms"] is not None]
    matmuls = [group for group in known if group["label"].startswith("matmul")]
    assert sum(group["count"] for group in matmuls) >= 3 * (2 * 4 + 1)
    assert all(0 < group["roofline_ms"] < group["ms"] for group in matmuls)
    assert known == sorted(known, key=lambda group: -group["over_ms"])


def test_memory_is_reported_by_pool(reports):
    pools = reports["pipeline"]["memory"]["pools"]
    assert {"parameters", "optimizer", "main_grad", "stash"} <= set(pools)
    assert pools["optimizer"] > 1.9 * pools["parameters"]


def test_kernels_in_cuda_graphs_have_the_instructions_of_their_names_and_a_remedy_for_others(recorded, reports):
    found = report.of_trace(recorded("one") / "captured")
    check_time(found)
    (graph,) = found["graphs"]
    assert (graph["launches"], graph["count"]) == (1, 105)
    assert 0.8 * graph["ms"] < graph["named_ms"] < graph["ms"]
    (note,) = [note for note in found["about"]["notes"] if "CUDA graphs" in note]
    assert 'compiler_options={"xla_gpu_enable_command_buffer": ""}' in note
    # All matmuls are fusions here.
    matmuls = [{g["label"] for g in of["groups"] if g["label"].startswith("matmul")} for of in (found, reports["one"])]
    assert matmuls[0] == matmuls[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_alone_has_the_report_of_the_recording(name, recorded, reports):
    found = report.of_trace(recorded(name) / "uncaptured")
    for key in ("uncaptured", "groups", "lines", "scopes", "collectives", "timeline"):
        assert found[key] == reports[name][key]
    steps, graphs = found["about"]["notes"]
    assert steps == "2 steps, marked by jax.profiler.StepTraceAnnotation."
    assert graphs.startswith("No kernel ran in a CUDA graph.")
    assert found["about"]["versions"] == {"jax": "0.11.2", "jaxlib": "0.11.2"}


def test_a_trace_without_its_program_has_kernels_and_scopes_and_names_the_missing_file(recorded, reports, monkeypatch):
    monkeypatch.setattr("jgraph.profile.report.read", lambda path: replace(read(path), programs={}))
    found = report.of_trace(recorded("one") / "uncaptured")
    check_time(found)
    assert found["uncaptured"]["ranks"][0]["busy_ms"] == pytest.approx(reports["one"]["uncaptured"]["ranks"][0]["busy_ms"])
    assert {"jgraph.loss", "jgraph.optimizer"} <= {row["name"] for row in found["scopes"]}
    assert (found["lines"], {group["roofline_ms"] for group in found["groups"]}) == ([], {None})
    assert any("does not have the text of jit_step" in note and "`program`" in note for note in found["about"]["notes"])


def test_lines_and_scopes_add_up_to_the_busy_time(reports):
    for found in reports.values():
        busy_ms = found["uncaptured"]["ranks"][0]["busy_ms"]
        assert sum(row["ms"] for row in found["lines"]) == pytest.approx(busy_ms)
        assert sum(row["ms"] for row in found["scopes"]) == pytest.approx(busy_ms)


def test_collectives_are_exposed_or_hidden(reports):
    assert reports["one"]["collectives"] == []
    categories = reports["pipeline"]["uncaptured"]["ranks"][0]["categories"]
    for row in reports["pipeline"]["collectives"]:
        assert row["exposed_ms"] + row["hidden_ms"] == pytest.approx(row["ms"])
        assert bool(row["hidden_by"]) == (row["hidden_ms"] > 1e-9)
    for category in ("transfer", "all-reduce"):
        rows = [row for row in reports["pipeline"]["collectives"] if row["category"] == category]
        assert sum(row["exposed_ms"] for row in rows) == pytest.approx(categories[category]["ms"])
        assert sum(row["ms"] for row in rows) == pytest.approx(categories[category]["kernel_ms"])


def test_a_trace_and_a_program_have_the_same_report_as_the_recording(recorded, reports, tmp_path, capsys):
    program = tmp_path / "step.txt"
    program.write_text(gzip.decompress((recorded("one") / "program.txt.gz").read_bytes()).decode())
    trace = next((recorded("one") / "uncaptured").glob("*.xplane.pb"))
    flags = ["--program", str(program), "--steps", "2", "--out", str(tmp_path / "out")]
    assert main([str(trace), *flags]) == 0
    assert "of the busy time attributed" in capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "profile.json").read_text())
    assert found["uncaptured"] == reports["one"]["uncaptured"]


def test_a_program_that_did_not_run_is_refused(recorded, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("HloModule jit_other\n\nENTRY %main (x: f32[]) -> f32[] {\n  ROOT %x = f32[] parameter(0)\n}\n")
    with pytest.raises(ProfileError, match=r"no kernel of the program jit_other, but .*jit_step"):
        report.of_trace(recorded("one") / "uncaptured", program=other, steps=2)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere"], "nowhere: no such file or directory"),
        (["traces", "--steps", "0"], "--steps is 0"),
        (["traces/one.tar.xz"], "one.tar.xz cannot be read as a trace"),
        (["."], ". has no trace"),
        ([], "required"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(argv, message, monkeypatch, capsys):
    monkeypatch.chdir(Path(__file__).parent)
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_an_incomplete_recording_is_refused(recorded, tmp_path):
    (tmp_path / "run.json").write_text((recorded("one") / "run.json").read_text())
    with pytest.raises(ProfileError, match="has no complete recording"):
        report.of_run(tmp_path)


@pytest.fixture
def copied(recorded, tmp_path):
    """Returns a function that copies a recording, so that a test can damage it. Traces are links."""

    def of(name):
        for part in recorded(name).iterdir():
            (tmp_path / part.name).symlink_to(part)
        for file in ("run.json", "program.txt.gz"):
            (tmp_path / file).unlink()
            (tmp_path / file).write_bytes((recorded(name) / file).read_bytes())
        return tmp_path

    return of


@pytest.mark.parametrize(("name", "change"), [("steps", {"steps": None}), ("title", {})])
def test_a_recording_without_a_field_is_refused_with_its_name(copied, name, change):
    directory = copied("one")
    about = json.loads((directory / "run.json").read_text())
    del about[name]
    (directory / "run.json").write_text(json.dumps(about | change))
    with pytest.raises(ProfileError, match=f"run.json has no {name}"):
        report.of_run(directory)


@pytest.mark.parametrize("text", ["[]", "null", "1", "", "{", "[" * 100_000, '{"a":' * 100_000])
def test_a_recording_with_invalid_json_is_refused(copied, text):
    directory = copied("one")
    (directory / "run.json").write_text(text)
    with pytest.raises(ProfileError, match="has no complete recording"):
        report.of_run(directory)


def test_a_recorded_pipeline_on_an_untraced_device_is_refused(copied):
    directory = copied("pipeline")
    about = json.loads((directory / "run.json").read_text())
    about["pipeline"] |= {"devices": [0, 1, 2, 99]}
    (directory / "run.json").write_text(json.dumps(about))
    with pytest.raises(ProfileError, match=r"run\.json has a rank on device 99"):
        report.of_run(directory)


def test_a_damaged_archive_of_the_program_is_refused(copied):
    file = copied("one") / "program.txt.gz"
    contents = bytearray(file.read_bytes())
    contents[30] ^= 255
    file.write_bytes(contents)
    with pytest.raises(ProfileError, match="has no complete recording"):
        report.of_run(file.parent)


def cut_in_a_line(text):
    return text[: text.index(" = ", len(text) // 2) + 8]


def cut_before_the_end(text):
    return text[: text.rindex("}")]


def without_a_computation(text):
    return re.sub(r"calls=%[\w.]+", "calls=%gone", text)


def without_anything(text):
    return ""


@pytest.mark.parametrize("damage", [cut_in_a_line, cut_before_the_end, without_a_computation, without_anything])
def test_a_truncated_or_damaged_program_text_is_refused(recorded, tmp_path, damage):
    text = gzip.decompress((recorded("one") / "program.txt.gz").read_bytes()).decode()
    program = tmp_path / "step.txt"
    program.write_text(damage(text))
    with pytest.raises(ProfileError, match="program"):
        report.of_trace(recorded("one") / "uncaptured", program=program, steps=2)


def assert_profiled(run_dir, printed, pools):
    assert "profile of steps 3 to 4" in printed
    written = run_dir / "profile"
    profile = json.loads((written / "profile.json").read_text())
    check(profile)
    assert {"parameters", "optimizer", "main_grad"} | pools <= set(profile["memory"]["pools"])
    assert (written / "profile.html").stat().st_size > 0
    before = (written / "profile.json").read_text()
    assert main([str(run_dir)]) == 0
    assert (written / "profile.json").read_text() == before
    assert [entry["step"] for entry in tiny.entries(run_dir)] == [1, 2, 5, 6, 7, 8]


def test_a_run_records_a_profile_and_continues_with_the_same_losses(tmp_path, capsys):
    assert tiny.train(tmp_path / "run", "--steps", "8", "--profile", "2:4") == 0
    assert_profiled(tmp_path / "run", capsys.readouterr().out, set())
    assert tiny.train(tmp_path / "plain", "--steps", "8") == 0
    assert tiny.losses(tmp_path / "run") == [entry for entry in tiny.losses(tmp_path / "plain") if entry[0] not in (3, 4)]


@pytest.mark.once
def test_a_pipelined_run_records_a_profile_and_continues(tmp_path, capsys):
    flags = ("--pp", "2", "--num-microbatches", "2", "--model.num-layers", "2")
    assert tiny.train(tmp_path / "run", "--steps", "8", "--profile", "2:4", *flags) == 0
    assert_profiled(tmp_path / "run", capsys.readouterr().out, {"residuals to dgrad", "residuals to wgrad", "stash"})


@pytest.mark.parametrize("window", ["3", "3:", "5:3", "a:b", "-1:2", "8:10"])
def test_an_invalid_window_is_refused(window, tmp_path):
    with pytest.raises(ConfigError) as error:
        TrainConfig.from_fields(steps=12, run_dir=str(tmp_path), profile=window)
    assert error.value.field == "profile"


def test_a_run_that_is_too_short_for_its_window_is_refused_with_the_needed_steps(tmp_path):
    with pytest.raises(ConfigError, match="at least 14 steps"):
        TrainConfig.from_fields(steps=13, run_dir=str(tmp_path), profile="8:10")
    TrainConfig.from_fields(steps=14, run_dir=str(tmp_path), profile="8:10")


def test_a_window_before_the_resumed_step_is_reported(tmp_path, capsys):
    assert tiny.train(tmp_path, "--steps", "5", "--checkpoint-every", "3") == 0
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text().replace('"steps": 5', '"steps": 9'))
    capsys.readouterr()
    assert tiny.train(tmp_path, "--steps", "9", "--checkpoint-every", "3", "--profile", "1:2") == 0
    assert "no profile: --profile is 1:2, but 5 steps are already done" in capsys.readouterr().out
