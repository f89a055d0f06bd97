import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jgraph.errors import CompilerOptionError, ConfigError, TargetError
from jgraph.kernels.grouped import grouped_dot
from jgraph.xla import CaptureReport, Outside, compiler_options
from jgraph.xla.explain import Explanation, explain

HERE = Path(__file__)


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


STATE = {"m": array(9), "v": array(9), "w": array(64, 64)}
X = array(32, 64)


def update(state, x):
    return {name: leaf + 1 for name, leaf in state.items()}, jnp.tanh(x @ state["w"]).sum()


def by_leaf(report):
    return {donation.leaf: donation for donation in report.donations}


def line_of(marker):
    (line,) = (i for i, code in enumerate(HERE.read_text().splitlines(), 1) if code.endswith(f"# {marker}"))
    return f"tests/xla/test_explain.py:{line}"


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch):
    monkeypatch.chdir(HERE.parents[2])


# --- Donations: the same on every platform. ---


def test_each_donated_leaf_is_listed_with_the_output_that_reuses_its_buffer():
    report = explain(update, STATE, X, donate_argnums=0)
    assert {d.leaf: d.output for d in report.donations} == {f"state['{k}']": f"result[0]['{k}']" for k in STATE}
    assert report.dropped == ()
    assert [(d.array, d.nbytes) for d in report.donations if "w" in d.leaf] == [("float32[64,64]", 16384)]


def test_a_jitted_function_keeps_its_own_donations():
    assert len(explain(jax.jit(update, donate_argnums=0), STATE, X).donations) == 3
    assert explain(jax.jit(update), STATE, X).donations == ()
    with pytest.raises(ConfigError, match=r"pass it to jax\.jit"):
        explain(jax.jit(update), STATE, X, donate_argnums=0)


def test_a_leaf_without_a_matching_output_is_reported_as_dropped_without_a_jax_warning():
    def step(state, x):
        new, loss = update(state, x)
        return {**new, "m": new["m"].astype(jnp.bfloat16)}, loss

    report = explain(step, STATE, X, donate_argnums=0)
    (dropped,) = report.dropped
    assert by_leaf(report)["state['m']"].output == "result[0]['v']"
    assert dropped.leaf == "state['v']"
    assert "every output that is float32[9] uses another donated buffer" in str(dropped)
    assert "state['m'] float32[9] -> result[0]['v']\n" in str(report)


def test_each_dropped_donation_has_a_reason():
    def step(state, scratch, unused):
        return {"a": state["a"].astype(jnp.bfloat16)}, scratch.sum()

    found = by_leaf(explain(step, {"a": array(8)}, array(7), array(3), donate_argnums=(0, 1, 2)))
    assert {leaf: d.reason for leaf, d in found.items()} == {
        "state['a']": "no output is float32[8]",
        "scratch": "no output is float32[7]",
        "unused": "the program does not use it",
    }


def test_an_unused_argument_does_not_shift_other_donations():
    found = by_leaf(explain(lambda unused, a, b: (a * 2, b + 1), array(3), array(4), array(5), donate_argnums=(1, 2)))
    assert {leaf: d.output for leaf, d in found.items()} == {"a": "result[0]", "b": "result[1]"}


def test_ordered_effect_tokens_do_not_shift_arguments_or_outputs():
    def step(state, x):
        jax.debug.print("{}", x.sum(), ordered=True)
        return update(state, x)

    assert {d.leaf: d.output for d in explain(step, STATE, X, donate_argnums=0).donations} == {
        f"state['{k}']": f"result[0]['{k}']" for k in STATE
    }


def test_swapped_arguments_map_to_the_outputs_that_reuse_their_buffers():
    report = explain(lambda a, b: (b["x"] * 2, {"x": a["x"] + 1}), {"x": array(8)}, {"x": array(4)}, donate_argnums=(0, 1))
    assert {d.leaf: d.output for d in report.donations} == {"a['x']": "result[1]['x']", "b['x']": "result[0]"}


# --- The report. ---


def test_the_cpu_report_has_memory_and_donations_and_notes_the_missing_capture():
    report = explain(update, STATE, X, donate_argnums=0)
    assert report.capture is None
    assert report.memory.arguments == 4 * (9 + 9 + 64 * 64 + 32 * 64)
    assert report.memory.aliased == 4 * (9 + 9 + 64 * 64)
    assert report.memory.total == report.memory.arguments + report.memory.temporaries + (
        report.memory.outputs - report.memory.aliased
    )
    assert str(report).splitlines()[0] == "update on cpu"
    assert report.notes == ("there are no command buffers on a cpu: use target='h200' for the report of a GPU",)
    assert "note: there are no command buffers on a cpu" in str(report)


def test_a_step_with_grouped_matmuls_updates_its_experts_in_place():
    def step(state, x):
        gradients = jax.grad(lambda w: jnp.sum(grouped_dot(x, w, jnp.array([20, 0, 12]))))(state["w"])
        return {"w": state["w"] - gradients}

    report = explain(step, {"w": array(3, 64, 16)}, X, donate_argnums=0)
    assert {leaf: found.output for leaf, found in by_leaf(report).items()} == {"state['w']": "result['w']"}
    assert (report.dropped, report.capture) == ((), None)


def test_the_json_report_has_every_field():
    report = explain(update, STATE, X, donate_argnums=0)
    fields = json.loads(report.to_json())
    assert set(fields) == {"name", "device", "capture", "donations", "memory", "buffers", "fp8", "collectives", "notes"}
    assert fields["donations"][0] == {
        "leaf": "state['m']",
        "array": "float32[9]",
        "nbytes": 36,
        "output": "result[0]['m']",
        "reason": "",
    }
    assert fields["memory"]["total"] == report.memory.total


def test_a_long_donation_list_prints_the_first_leaves_and_counts_the_rest():
    report = explain(lambda s: [leaf + 1 for leaf in s], [array(3)] * 20, donate_argnums=0)
    assert "donated: 20 leaves of 240 B: 20 reused, 0 dropped" in str(report)
    assert "  and 12 more" in str(report)
    assert len(report.donations) == 20


def test_a_graph_flag_in_a_remedy_is_printed_with_the_equivalent_compiler_options():
    def printed(remedy):
        return str(Explanation("f", "gpu", CaptureReport(0, 0, 1, (Outside("While", 1, "off", remedy),)), (), None))

    assert "compiler_options=jgraph.compiler_options('full', platform='gpu')" in printed("`graph` full")
    assert "compiler_options=" not in printed("rewrite it")


def test_an_argument_that_is_not_a_function_is_refused():
    with pytest.raises(ConfigError, match="`fn` is int: must be a function"):
        explain(3)


def test_an_invalid_option_and_an_invalid_target_raise_library_errors():
    with pytest.raises(CompilerOptionError, match="xla_nope"):
        explain(jnp.sin, 1.0, compiler_options={"xla_nope": 1})
    with pytest.raises(TargetError, match="take one of h200, h100, b200"):
        explain(jnp.sin, 1.0, target="tpu")


def test_a_partial_function_gets_a_generic_name():
    report = explain(functools.partial(lambda k, s: s * k, 2), array(3), donate_argnums=0)
    assert [d.output for d in report.donations] == ["result"]
    assert report.name == "partial"


class FilterJit:
    """As `equinox.filter_jit(donate="all")`: takes leaves of any type, donates arrays, and has `lower` but not `trace`."""

    def __init__(self, fn):
        self.jitted = jax.jit(fn, static_argnums=1, donate_argnums=0)

    def __call__(self, state, activation, x):
        state, loss = self.jitted(state, activation, x)
        return state, loss, activation

    lower = None


def test_a_wrapper_of_jax_jit_is_explained_with_its_donations_by_path():
    def step(state, activation, x):
        return {"w": state["w"] + 1, "m": state["m"][:3]}, activation(x @ state["w"]).sum()

    state = {"w": jnp.ones((64, 64)), "m": jnp.ones(9)}
    report = explain(FilterJit(step), state, jax.nn.relu, jnp.ones((32, 64)))
    assert {d.leaf: d.output for d in report.donations} == {"args[0]['w']": "result[0]['w']", "args[0]['m']": ""}
    assert not state["w"].is_deleted()


def test_a_function_of_nnx_jit_is_explained():
    @functools.partial(nnx.jit, donate_argnums=0)
    def step(model, x):
        model.kernel[...] += 1
        return model(x).sum()

    report = explain(step, nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jnp.ones((4, 8)))
    assert [d.array for d in report.dropped] == []
    assert len(report.donations) == 2


# --- On a compile-only target. ---


def mlp(w, x):
    for _ in range(6):
        x = jnp.tanh(x @ w)
    return x


def spectrum(x):
    return jnp.fft.fft(x).real  # the line of the fft


W = array(64, 64)


@pytest.mark.target
def test_an_outside_thunk_is_reported_with_its_operation_and_source_line(h200):
    report = explain(lambda w, x: mlp(w, spectrum(mlp(w, x))), W, X, target="h200")
    assert (report.capture.command_buffers, report.capture.captured) == (2, report.capture.total - 1)
    (fft,) = report.capture.outside
    (op,) = fft.ops
    assert (fft.kind, op.source) == ("Fft", line_of("the line of the fft"))
    assert op.name.endswith("/fft")
    assert f"{op.name} at {op.source}" in str(report)
    assert "matmul" in fft.remedy
    assert json.loads(report.to_json())["capture"]["outside"][0]["ops"][0]["source"] == op.source


@pytest.mark.target
def test_an_outside_loop_is_reported_by_its_source_line_and_its_remedy_captures_it(h200):
    def decay(w, x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: jnp.tanh(x @ w), x)  # the line of the loop

    report = explain(decay, W, X, target="h200")
    loops = [outside for outside in report.capture.outside if outside.kind == "While"]
    assert {op.source for outside in loops for op in outside.ops} == {line_of("the line of the loop")}
    assert {outside.remedy for outside in loops} == {"`graph` full"}
    full = explain(decay, W, X, target="h200", compiler_options=compiler_options("full", platform="gpu"))
    assert full.capture.captured == full.capture.total
    assert "compiler_options=" in str(report)
    assert "compiler_options=" not in str(full)


@pytest.mark.long
@pytest.mark.target
def test_a_slicing_loop_needs_both_suggested_remedies(h200):
    def scan(stacked, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stacked)[0]

    def remedies(graph, extra=()):
        options = compiler_options(graph, extra, platform="gpu")
        report = explain(scan, array(4, 64, 64), X, target="h200", compiler_options=options)
        return {o.remedy for o in report.capture.outside if o.kind == "While"}

    unroll = "xla_gpu_command_buffer_unroll_loops=true"
    assert any("`graph` full" in remedy and unroll in remedy for remedy in remedies("auto"))
    assert any(unroll in remedy for remedy in remedies("full"))
    assert remedies("full", [unroll]) == set()


@pytest.mark.target
def test_a_short_kernel_sequence_is_captured_with_the_suggested_option(h200):
    report = explain(jnp.sin, X, target="h200")
    assert [o.reason for o in report.capture.outside] == ["fewer than 5 in a row"]
    assert "xla_gpu_graph_min_graph_size=1" in report.capture.outside[0].remedy
    options = {"xla_gpu_graph_min_graph_size": 1}
    assert explain(jnp.sin, X, target="h200", compiler_options=options).capture.outside == ()


@pytest.mark.target
def test_donations_and_memory_describe_the_target(h200):
    report = explain(update, STATE, X, donate_argnums=0, target="h200")
    assert "H200" in report.device
    assert [d.output for d in report.donations] == [f"result[0]['{k}']" for k in STATE]
    assert report.memory.aliased == 4 * (9 + 9 + 64 * 64)
    assert "compiled without the GPU" in str(report)


@pytest.mark.long
@pytest.mark.target
def test_static_arguments_and_constants_computed_while_tracing_are_allowed_with_a_target(h200):
    @functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
    def step(state, count, x):
        with jax.ensure_compile_time_eval():
            scale = float(jnp.arange(3).sum())
        for _ in range(count):
            state = jnp.tanh(state @ x) * scale
        return state

    report = explain(step, jnp.ones((64, 64)), 8, jnp.ones((64, 64)), target="h200")
    assert report.capture.total >= 8
    assert [d.output for d in report.donations] == ["result"]
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    state = jax.device_put(jnp.ones((64, 64)), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    with jax.set_mesh(mesh):
        found = explain(step, state, 8, state, target="h200").capture
    assert dataclasses.replace(found, buffers=()) == dataclasses.replace(report.capture, buffers=())  # other names of calls


@pytest.mark.target
def test_a_program_on_a_mesh_of_one_present_device_is_compiled_for_the_target(h200):
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    step = jax.jit(update, in_shardings=(sharding, sharding), out_shardings=sharding, donate_argnums=0)
    state = {name: jnp.ones(leaf.shape) for name, leaf in STATE.items()}
    x = jnp.ones(X.shape)
    with pytest.raises(TargetError, match="names present devices in its shardings"):
        explain(step, state, x, target="h200")
    with jax.set_mesh(mesh):
        report = explain(step, *jax.device_put((state, x), sharding), target="h200")
    assert report.device.startswith("NVIDIA H200")
    assert report.capture.total > 0
    assert {d.leaf: d.output for d in report.donations} == {f"state['{k}']": f"result[0]['{k}']" for k in STATE}


@pytest.mark.target
def test_a_program_of_several_present_devices_is_compiled_for_as_many_gpus(h200):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x = jax.device_put(jnp.ones(8), sharding)
    options = compiler_options("off", platform="gpu")
    report = explain(jax.jit(lambda x: x.sum()), x, target="h200", compiler_options=options)
    assert {outside.kind for outside in report.capture.outside} & {"AllReduce", "CollectiveKernel"}
    with pytest.raises(TargetError, match=r"names 2 present devices in its shardings: build its mesh from jgraph\.xla\.aot"):
        explain(jax.jit(lambda x: x.sum(), in_shardings=sharding), x, target="h200")
