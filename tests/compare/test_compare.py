"""`jgraph.compare`: feeding back of donated arguments, the comparison of results, the table, the page and the command."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgraph
from jgraph.compare.__main__ import main
from jgraph.compare._compare import Comparison, Measurement
from jgraph.compare._difference import Difference, difference
from jgraph.compare._program import Running
from jgraph.xla import CaptureReport
from jgraph.xla.explain import Memory
from tests import browser

SHORT = {"rounds": 1, "seconds": 1e-4}
PARAMS = {"w": jnp.ones((4, 2)), "b": jnp.zeros(2)}
BATCH = {"x": jnp.arange(24.0).reshape(6, 4) / 24, "y": jnp.ones((6, 2))}
OPTIMIZER = optax.adamw(0.1)


def loss(params, batch, key=None):
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


@jax.jit(donate_argnums=(0, 1))
def plain(params, moments, batch):
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return value, optax.apply_updates(params, updates), moments


@pytest.fixture(scope="module")
def steps():
    """A plain step and a step of jgraph. Their results are the loss and the parameters in the model's tree."""
    step = jgraph.train_step(loss, OPTIMIZER, jgraph.Replicated(None, PARAMS))
    ours = jgraph.Program(
        step.compile(BATCH),
        (step.init(PARAMS), step.place(BATCH)),
        name="ours",
        result=lambda out: (out[1].loss, step.canonical.of(out[0]).params),
    )
    return jgraph.Program(plain, (PARAMS, OPTIMIZER.init(PARAMS), BATCH), result=lambda out: out[:2]), ours


# --- Programs ---


def test_a_plain_step_and_a_step_of_jgraph_have_the_same_results(steps):
    found = jgraph.compare(*steps, rounds=2, seconds=1e-4)
    assert found.difference.mismatch == ""
    assert found.difference.relative < 1e-6
    assert (found.f.name, found.g.name) == ("plain", "ours")
    assert len(found.f.step_ms) == len(found.g.host_ms) == 2
    assert found.ratios == tuple(a / b for a, b in zip(found.f.step_ms, found.g.step_ms, strict=True))
    assert found.g.memory == steps[1].fn.memory
    assert found.f.memory == jgraph.explain(plain, *steps[0].args).memory


def test_arguments_that_a_program_donates_stay_valid(steps):
    jgraph.compare(*steps, **SHORT)
    arrays = jax.tree.leaves([program.args for program in steps])
    assert len(arrays) > 10
    assert not any(array.is_deleted() for array in arrays)


@pytest.mark.parametrize(
    "returned",
    [
        lambda state: state,
        lambda state: (jnp.sum(state["a"]), state),
        lambda state: {"loss": jnp.zeros(3), "state": state},
        lambda state: (jnp.sum(state["a"]), [0, {"state": state}]),
    ],
    ids=["itself", "an element", "a value", "inside an element"],
)
def test_a_donated_argument_is_replaced_by_the_part_of_the_result_like_it(returned):
    def step(state, x):
        return returned({"a": state["a"] + x})

    # A second call with the donated state would raise an error.
    found = jgraph.compare(step, jax.jit(step, donate_argnums=()), {"a": jnp.zeros(3)}, 1.0, **SHORT)
    donating = jgraph.Program(step, ({"a": jnp.zeros(3)}, 1.0), donate_argnums=0)
    assert jgraph.compare(donating, step, {"a": jnp.zeros(3)}, 1.0, **SHORT).difference == found.difference


def test_two_donated_arguments_of_one_shape_keep_their_order():
    seen = []

    @jax.jit(donate_argnums=(0, 1))
    def step(a, b):
        jax.debug.callback(lambda a, b: seen.append((float(a), float(b))), a, b, ordered=True)
        return a + 1, b + 10

    jgraph.compare(step, lambda a, b: (a + 1, b + 10), jnp.zeros(()), jnp.zeros(()), **SHORT)
    jax.effects_barrier()
    assert len(seen) > 4
    assert {b - 10 * a for a, b in seen} == {0.0}
    # Each turn starts from the arguments.
    assert seen.count((0.0, 0.0)) == 2
    assert seen[1] == (1.0, 10.0)


def test_programs_run_on_several_devices():
    mesh = jax.make_mesh((2,), ("data",))
    x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, jax.P("data")))
    found = jgraph.compare(jnp.sum, lambda x: jnp.dot(x, jnp.ones(8)), x, **SHORT)
    assert found.f.device.startswith("2 x ")
    assert found.difference.absolute == 0


def test_random_keys_are_compared_by_their_integers():
    found = jgraph.compare(lambda key: jax.random.fold_in(key, 1), lambda key: key, jax.random.key(0), **SHORT)
    assert found.difference.absolute > 0


def test_functions_of_one_name_are_told_apart():
    found = jgraph.compare(lambda x: x, lambda x: x, jnp.ones(()), **SHORT)
    assert (found.f.name, found.g.name) == ("<lambda> (f)", "<lambda> (g)")


def donated_before():
    x = jnp.ones(4)
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    return x


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: jgraph.compare(1, loss), r"`f` is of type int: must be a function or a jgraph.Program"),
        (lambda: jgraph.compare(loss, loss, rounds=0), r"`rounds` is 0: must be at least 1"),
        (lambda: jgraph.compare(loss, loss, seconds=0), r"`seconds` is 0: must be positive"),
        (lambda: jgraph.Program(loss, PARAMS), r"`args` is of type dict: must be a tuple, such as \(state, batch\)"),
        (lambda: jgraph.Program(loss, (), result="loss"), r"`result` is of type str: must be a function of the result of `fn`"),
        (
            lambda: jgraph.compare(*[jgraph.Program(loss, (PARAMS, BATCH))] * 2, PARAMS),
            r"`args` must be left out: both programs are a jgraph.Program with its own",
        ),
        (
            lambda: jgraph.compare(plain, plain, PARAMS, donate_argnums=0),
            r"`donate_argnums` must be left out for a jitted",
        ),
        (
            lambda: jgraph.Program(jax.jit(jnp.sin).lower(1.0).compile(), (1.0,), donate_argnums=0),
            r"`donate_argnums` is 0: must be left out: `fn` is compiled",
        ),
        (
            lambda: jgraph.compare(lambda x: [x["a"] + 1], lambda x: x, {"a": jnp.ones(4)}, donate_argnums=0, **SHORT),
            "`fn` <lambda> donates argument 0 and returns nothing like it: return its new value in a tuple, list or dictionary",
        ),
        (
            lambda: jgraph.compare(jnp.sin, jnp.cos, donated_before()),
            r"`args` has an array that was donated to an earlier call",
        ),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line(call, message):
    with pytest.raises(jgraph.ConfigError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(jgraph.ConfigError, match="JAX runs in 2 processes: compare programs in one process"):
        jgraph.compare(jnp.sin, jnp.cos, jnp.ones(4))


def test_a_compiled_program_runs_as_it_is_and_reports_the_memory_of_xla():
    x = jnp.ones(3)
    compiled = jax.jit(lambda x: x + 1).lower(x).compile()
    running = Running(jgraph.Program(compiled, (x,)))
    assert (running.capture, running.memory) == (None, Memory.read(compiled))
    assert running.memory.arguments == x.nbytes


# --- Results ---


def test_equal_results_are_bitwise_equal():
    tree = {"a": np.array([1.0, np.nan, np.inf]), "b": np.arange(3)}
    assert difference(tree, dict(tree), ("f", "g")) == Difference(True, 0.0, 0.0)


def test_leaves_that_are_no_numbers_are_not_compared():
    assert difference((np.ones(2), jnp.tanh, "a"), (np.ones(2), jnp.sin, "b"), ("f", "g")) == Difference(True, 0.0, 0.0)


def test_a_difference_is_relative_to_the_largest_magnitude_of_its_array():
    f = {"big": np.array([100.0, 1.0]), "small": np.array([1e-3, 0.0])}
    g = {"big": np.array([100.0, 2.0]), "small": np.array([1e-3, 1e-4])}
    found = difference(f, g, ("f", "g"))
    assert found == Difference(False, 1.0, pytest.approx(0.1), "small")
    assert str(found) == "largest difference 1; at most 0.1 of the largest magnitude in its array in small"


def test_leaves_of_one_name_are_all_compared():
    f, g = ({"a/b": 1.0, "a": {"b": b}} for b in (1.0, 2.0))
    assert difference(f, g, ("f", "g")).absolute == 1.0
    assert difference(g, f, ("g", "f")).absolute == 1.0


def test_an_equal_infinity_is_not_the_largest_magnitude():
    assert difference(np.array([np.inf, 1.0]), np.array([np.inf, 2.0]), ("f", "g")).relative == 0.5


def test_a_nan_in_one_result_is_named_with_its_array():
    found = difference({"a": 1.0, "b": np.nan}, {"a": 1.0, "b": 1.0}, ("f", "g"))
    assert str(found) == "NaN or infinity in one of them in b"


def test_equal_values_with_other_bits_have_no_largest_difference():
    assert str(difference(0.0, -0.0, ("f", "g"))) == "equal values, but other dtypes, signs of zeros or kinds of NaN"


@pytest.mark.parametrize(
    ("f", "g", "absolute"),
    [
        (np.float32(0.0), np.float32(-0.0), 0.0),
        (np.float32(1.0), np.float64(1.0), 0.0),
        (np.uint8(1), np.uint8(3), 2.0),
        (np.int64(2**60), np.int64(2**60 + 1), 1.0),
        (np.array(True), np.array(False), 1.0),
        (np.array(jnp.bfloat16(1)), np.array(jnp.bfloat16(1.5)), 0.5),
        (np.complex64(3j), np.complex64(4), 5.0),
        (np.float32(np.nan), np.float32(1.0), None),
        (np.float32(np.inf), np.float32(-np.inf), None),
    ],
)
def test_results_with_other_bits_are_not_bitwise_equal(f, g, absolute):
    found = difference(f, (g,), ("f", "g"))
    assert not found.is_bitwise_equal
    assert found.absolute == absolute


@pytest.mark.parametrize(
    ("f", "g", "mismatch"),
    [
        ({"a": 1.0, "b": 1.0}, {"a": 1.0}, "mine returns b, which yours does not return"),
        ({"a": 1.0}, ({"a": 1.0}, 2.0), "mine returns a, which yours does not return"),
        ((), (1.0,), "yours returns 0, which mine does not return"),
        ((np.ones(2), 1.0), (np.ones(3), 1.0), "0 has shape [2] and [3]"),
        (np.ones(2), np.ones(3), "the array has shape [2] and [3]"),
    ],
)
def test_results_of_another_structure_are_not_compared(f, g, mismatch):
    found = difference(f, g, ("mine", "yours"))
    assert found == Difference(False, mismatch=mismatch)
    assert str(found) == f"not compared, because {mismatch}; `result` of jgraph.Program selects the part to compare"


# --- The report ---


def measurement(name: str, **changes: object) -> Measurement:
    capture = CaptureReport(command_buffers=2, captured=9, total=12)
    known = Measurement(name, "1 x NVIDIA H200", "gpu", (2.0, 4.0, 3.0), (0.5, 0.5, 0.5), None, capture)
    return dataclasses.replace(known, **changes)


ON_GPU = Comparison(measurement("a"), measurement("b", step_ms=(1.0, 1.0, 2.0), capture=None), Difference(True, 0.0, 0.0))


def test_the_table_has_medians_with_ranges():
    assert str(ON_GPU).splitlines() == [
        "          a                                     b",
        "step, ms  3 (2 to 4)                            1 (1 to 2)",
        "host, ms  0.5 (0.5 to 0.5)                      0.5 (0.5 to 0.5)",
        "memory    unknown                               unknown",
        "captured  9 of 12 thunks, in 2 command buffers  unknown",
        "device    1 x NVIDIA H200                       1 x NVIDIA H200",
        "a takes 2 (1.5 to 4) times as long as b",
        "results: bitwise equal",
    ]


def test_the_table_names_the_times_of_a_cpu():
    text = str(jgraph.compare(jnp.sin, jnp.cos, jnp.ones(4), **SHORT))
    assert text.count("a CPU has no command buffers") == 2
    assert text.endswith("\nsin and cos: times of a CPU, not of a GPU; on a CPU, the host time can contain computation")


def test_the_report_has_a_json_object(steps):
    found = jgraph.compare(*steps, **SHORT)
    fields = json.loads(found.to_json())
    assert {*fields} == {"f", "g", "difference", "ratios"}
    assert fields["g"]["memory"]["total"] == steps[1].fn.memory.total
    assert fields["f"]["capture"] is None


@browser.needed
def test_the_page_shows_both_programs_each_round_and_the_capture(tmp_path):
    titles = "[...document.querySelectorAll('h2, #rounds-table tbody tr')].map((each) => each.textContent)"
    assert browser.see(tmp_path, ON_GPU.to_html(), titles) == [
        *("Programs", "Rounds", "12.0001.0000.5000.5002.000", "24.0001.0000.5000.5004.000", "33.0002.0000.5000.5001.500"),
        "Capture of a",
    ]


# --- The command ---

FILE = """
import jax.numpy as jnp
import jgraph

def doubled():
    return (lambda x: 2 * x), (jnp.ones(3),), 0

def added():
    return jgraph.Program(lambda x: (x + x, 1), (jnp.ones(3),), result=lambda out: out[0])

def broken():
    return (lambda x: x.nothing), (jnp.ones(3),)

def other():
    return 3
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "my_compared.py"
    path.write_text(FILE)
    yield path
    sys.modules.pop("my_compared", None)


def test_the_command_compares_functions_of_a_file(file, tmp_path, capsys):
    json_file, html = tmp_path / "c.json", tmp_path / "c.html"
    flags = ["--rounds", "2", "--seconds", "0.0001", "--json", str(json_file), "--html", str(html)]
    assert main([f"{file}:doubled", "my_compared:added", *flags]) == 0
    first, *_, results, _cpu = capsys.readouterr().out.splitlines()
    assert first.split() == ["doubled", "added"]
    assert results == "results: bitwise equal"
    assert len(json.loads(json_file.read_text())["ratios"]) == 2
    assert browser.data_in(html.read_text())["names"] == ["doubled", "added"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("doubled", "'doubled' must be MODULE:NAME or FILE.py:NAME"),
        ("no.py:doubled", "no.py is not a file"),
        ("{file}:nothing", "{file} has no 'nothing': must be a class or a function"),
        (
            "{file}:other",
            "other() returns int: must return a jgraph.Program, (fn, args) or (fn, args, donate_argnums)",
        ),
        ("{file}:broken", "cannot be compared: AttributeError: "),
    ],
)
def test_the_command_refuses_a_wrong_program_in_one_line(file, capsys, name, message):
    assert main([name.format(file=file), f"{file}:added"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jgraph.compare: error: ")
    assert message.format(file=file) in line


def test_files_whose_modules_have_one_name_are_refused(file, tmp_path, capsys):
    other = tmp_path / "other" / file.name
    other.parent.mkdir()
    other.write_text(FILE)
    assert main([f"{file}:doubled", f"{other}:added"]) == 2
    problem = f"{other} cannot be imported beside {file}: rename one of them"
    assert capsys.readouterr().err == f"jgraph.compare: error: {problem}\n"


def test_files_beside_which_modules_have_one_name_are_refused(file, tmp_path, capsys):
    # `user.py` would import the module beside the first file.
    user = tmp_path / "other" / "user.py"
    user.parent.mkdir()
    user.with_name(file.name).write_text(FILE)
    user.write_text("from my_compared import added\n")
    assert main([f"{file}:doubled", f"{user}:added"]) == 2
    assert f"{user.with_name(file.name)} cannot be imported beside {file}" in capsys.readouterr().err


def test_a_file_with_the_name_of_an_imported_module_is_refused(file, capsys):
    shadow = file.rename(file.with_name("dataclasses.py"))
    assert main([f"{shadow}:doubled", f"{shadow}:added"]) == 2
    assert f"{shadow} cannot be imported beside {dataclasses.__file__}" in capsys.readouterr().err


def test_an_import_of_the_room_does_not_replace_the_function():
    code = "import jgraph, jgraph.compare; print('compare' in vars(jgraph))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
