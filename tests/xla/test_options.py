import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jgraph.errors import CompilerOptionError, ConfigError
from jgraph.xla import aot, compile_and_report, compiler_options, options
from jgraph.xla.options import installed_options

SIZE = "xla_gpu_graph_min_graph_size"
COMMANDS = "xla_gpu_enable_command_buffer"


@pytest.fixture
def lowered():
    return jax.jit(lambda x: x + 1).lower(jnp.ones(3))


@pytest.mark.parametrize("graph", ["auto", "off", "full"])
def test_a_cpu_gets_no_graph_options(graph, lowered):
    assert compiler_options(graph, platform="cpu") == {}


def test_auto_keeps_the_defaults_of_xla():
    assert compiler_options("auto", platform="gpu") == {}


def test_full_captures_loops_and_single_kernels_but_not_collectives():
    found = compiler_options("full", platform="cuda")
    commands = str(found[COMMANDS]).split(",")
    assert {"FUSION", "WHILE", "CONDITIONAL", "CONVOLUTION", "DYNAMIC_SLICE_FUSION"} <= set(commands)
    assert not {"COLLECTIVES", "INVALID"} & set(commands)
    assert found[SIZE] == 1


def test_full_on_several_devices_captures_collectives_but_not_branches():
    found = compiler_options("full", platform="gpu", num_devices=4)
    commands = set(str(found[COMMANDS]).split(","))
    assert {"FUSION", "COLLECTIVES", "CUBLASLT"} <= commands
    assert not {"WHILE", "CONDITIONAL", "INVALID"} & commands
    small = "xla_gpu_experimental_use_collective_kernels"
    assert not found.get(small)
    assert (small in found) == (small in (installed_options() or {}))


def test_an_invalid_graph_value_is_refused_with_the_valid_choices():
    with pytest.raises(ConfigError, match="must be one of auto, off, full") as error:
        compiler_options("on", platform="cpu")
    assert error.value.field == "graph"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (f"{SIZE}=7", "7"),
        ("xla_gpu_command_buffer_unroll_loops=true", True),
        ("xla_gpu_command_buffer_unroll_loops=False", False),
        ("xla_gpu_command_buffer_scheduling_mode=LHS", "LHS"),
        (f"{COMMANDS}=FUSION,WHILE", "FUSION,WHILE"),
        (f"{COMMANDS}=", ""),
        ("xla_dump_hlo_pass_re=a=b", "a=b"),
    ],
)
def test_extra_options_become_strings_or_bools(text, value):
    found = compiler_options("auto", [text], platform="cpu")
    assert found == {text.partition("=")[0]: value}
    assert type(*found.values()) is type(value)


def test_an_extra_option_overrides_the_graph_setting():
    assert compiler_options("full", [f"{SIZE}=9"], platform="gpu")[SIZE] == "9"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("xla_gpu_graph_min_graph_sizes=1", f"xla_gpu_graph_min_graph_sizes, which .* does not have; did you mean {SIZE}"),
        ("nothing_like_it=1", "nothing_like_it, which the installed XLA does not have$"),
        ("xla_dump_to", "'xla_dump_to': must be name=value"),
    ],
)
def test_an_invalid_extra_option_is_refused_by_name(text, message):
    with pytest.raises(CompilerOptionError, match=message) as error:
        compiler_options("auto", [text], platform="cpu")
    assert error.value.field == "xla_options"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{SIZE}=many", f"While setting option {SIZE}, 'many' is not a valid int32 value"),
        (f"{SIZE}=4294967296", "is not a valid int32 value"),
        ("xla_gpu_command_buffer_unroll_loops=yes", "'yes' is not a valid bool value"),
        (f"{COMMANDS}=FUSION,while", f"{COMMANDS}, 'while' is not a valid enum value"),
        ("xla_backend_extra_options=a", "is not a valid message value"),
    ],
)
def test_an_invalid_option_value_raises_a_library_error_at_compile_time(text, message, lowered):
    with pytest.raises(CompilerOptionError, match=message) as error:
        compile_and_report(lowered, compiler_options("auto", [text], platform="cpu"))
    assert error.value.field == "xla_options"


@pytest.mark.parametrize(
    ("name", "is_bool", "repeated"),
    [
        (SIZE, False, False),
        (COMMANDS, False, True),
        ("xla_cpu_enable_fast_math", True, False),
        ("xla_dump_to", False, False),
        ("xla_disable_hlo_passes", False, True),
    ],
)
def test_installed_options_have_their_types(name, is_bool, repeated):
    option = options.installed_options()[name]
    assert (option.is_bool, option.repeated) == (is_bool, repeated)


def test_the_last_option_of_the_descriptor_is_read():
    # This option is at the end of DebugOptions. A parser that stops early would miss it.
    assert "xla_backend_extra_options" in options.installed_options()
    assert len(options.installed_options()) > 250


def test_jax_has_no_public_list_of_compiler_options():
    """If this fails, jaxlib exposes every option as an attribute: read the names there and drop the descriptor."""
    from jaxlib import _jax

    assert not hasattr(_jax.DebugOptions, COMMANDS)
    assert not hasattr(jax, "compiler_options")


def test_checking_options_starts_no_backend():
    code = "from jgraph.xla import options; options.compiler_options('full', ['xla_nope=1'], platform='gpu')"
    # The platform does not exist, so starting a backend would raise another error.
    env = {"JAX_PLATFORMS": "no_such_platform", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert run.stderr.splitlines()[-1].startswith("jgraph.errors.CompilerOptionError: `xla_options` names xla_nope")


def test_without_a_descriptor_xla_refuses_unknown_options(lowered, monkeypatch):
    monkeypatch.setattr(options, "installed_options", lambda: None)
    found = compiler_options("auto", ["xla_nope=1"], platform="cpu")
    with pytest.raises(CompilerOptionError, match="No such compile option: 'xla_nope'"):
        compile_and_report(lowered, found)
    assert "WHILE" in str(compiler_options("full", platform="gpu")[COMMANDS])


def test_other_compile_errors_propagate_unchanged():
    with pytest.raises(RuntimeError, match="out of memory"), options.option_errors():
        raise RuntimeError("out of memory")


def test_a_missing_library_has_no_descriptor(monkeypatch):
    monkeypatch.setattr(options.importlib.util, "find_spec", lambda name: None)
    assert options._debug_options_descriptor() is None


@pytest.mark.target
@pytest.mark.parametrize("graph", ["auto", "off", "full"])
def test_xla_accepts_the_options_of_each_graph_value(graph, h200):
    found = compiler_options(graph, platform="gpu")
    _, report = aot.compile_for(jax.jit(lambda x: x + 1), jnp.ones(3), compiler_options=found)
    # The program has one kernel. Only `full` records single kernels.
    assert (report.captured, report.total) == (1 if graph == "full" else 0, 1)


def test_on_a_cpu_extra_options_reach_the_compiler(lowered):
    found = compiler_options("auto", ["xla_cpu_enable_fast_math=true"], platform="cpu")
    compiled, report = compile_and_report(lowered, found, platform="cpu")
    assert report is None
    assert compiled(jnp.ones(3)).tolist() == [2, 2, 2]
