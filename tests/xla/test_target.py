import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from jgraph.aot import main
from jgraph.errors import CompilerOptionError, TargetError
from jgraph.inspect.__main__ import main as inspect
from jgraph.xla import aot, check_identity


def train_step(state, x):
    def loss(params):
        h = jnp.tanh(x @ params["in"]) @ params["out"]
        return (h**2).mean()

    value, grads = jax.value_and_grad(loss)(state["params"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
    return {"step": state["step"] + 1, "params": params, "momentum": momentum}, value


@pytest.fixture
def state():
    params = {"in": jnp.ones((64, 128)), "out": jnp.ones((128, 64))}
    return {"step": jnp.zeros((), jnp.int32), "params": params, "momentum": jax.tree.map(jnp.zeros_like, params)}


@pytest.mark.long
@pytest.mark.target
def test_xla_attention_is_one_command_buffer(h200):
    def step(w, x_BTHK):
        def loss(w):
            q = x_BTHK @ w
            return jax.nn.dot_product_attention(q, x_BTHK, x_BTHK, is_causal=True, implementation="xla").sum()

        return w - jax.grad(loss)(w)

    w, x = jax.ShapeDtypeStruct((32, 32), jnp.bfloat16), jax.ShapeDtypeStruct((2, 64, 4, 32), jnp.bfloat16)
    compiled, report = aot.compile_for(jax.jit(step, donate_argnums=0), w, x)
    assert report.command_buffers == 1
    assert report.captured == report.total
    assert check_identity(compiled, w) is None


@pytest.mark.long
@pytest.mark.target
def test_a_training_step_for_an_absent_hopper_gpu_holds_no_scores_of_attention(h200, capsys, tmp_path):
    report = tmp_path / "report.json"
    sizes = ("--batch-size", "2", "--seq-len", "768", "--json", str(report))
    assert inspect(["capture", "launch-bound", "--target", "h200", *sizes]) == 0
    fields = json.loads(report.read_text())
    holds_scores = any("768,768" in buffers["shape"] for buffers in fields["buffers"])
    has_kernel = jax.__version_info__ >= (0, 11)
    assert holds_scores != has_kernel
    assert any(f"attention is {'jgraph' if has_kernel else 'XLA'}'s" in note for note in fields["notes"])


@pytest.mark.target
def test_the_target_h200_is_not_in_jax_devices(h200):
    assert "H200" in h200[0].device_kind
    assert {d.platform for d in jax.devices()} == {"cpu"}
    assert jax.jit(jnp.sin)(0.0) == 0


@pytest.mark.long
@pytest.mark.target
@pytest.mark.parametrize("first", ["jax.devices()", "aot.devices()"])
def test_the_plugin_does_not_affect_the_cpu_backend(h200, first):
    code = f"import jax; from jgraph.xla import aot; {first}; aot.devices(); print(jax.devices(), jax.numpy.ones(2) + 1)"
    env = {name: os.environ[name] for name in ("PYTHONPATH", "XDG_CACHE_HOME")} | {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": ""}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert run.stdout.strip() == "[CpuDevice(id=0)] [2. 2.]"
    assert run.stderr == ""


@pytest.mark.target
@pytest.mark.parametrize(("gpu", "capability"), [("h200", "9.0"), ("h100", "9.0"), ("b200", "10.0")])
def test_each_described_gpu_compiles_a_fully_captured_training_step(h200, gpu, capability, state):
    (device,) = aot.devices(gpu=gpu)
    assert gpu.upper() in device.device_kind
    assert str(device.compute_capability).startswith(capability)
    step = jax.jit(train_step, donate_argnums=0, keep_unused=True)
    compiled, report = aot.compile_for(step, state, jnp.ones((32, 64)), gpu=gpu)
    assert (report.command_buffers, report.captured) == (1, report.total)
    assert check_identity(compiled, state) is None


def test_every_gpu_description_is_listed_and_unknown_names_are_refused():
    files = Path(aot.__file__).parent.glob("*.textproto")
    assert {file.stem for file in files} == set(aot.GPUS)
    with pytest.raises(TargetError, match="no GPU is described as 'a100': take one of h200, h100, b200"):
        aot.devices(gpu="a100")


@pytest.mark.target
def test_a_program_compiles_for_a_mesh_of_several_target_devices(h200):
    mesh = jax.sharding.Mesh(aot.devices(2), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    compiled, _ = aot.compile_for(jax.jit(lambda x: x.sum()), jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding))
    assert "all-reduce" in compiled.as_text()


@pytest.mark.target
def test_arguments_may_be_python_numbers_and_prng_keys(h200):
    def noise(key, scale):
        return jax.random.normal(key, (8,)) * scale

    compiled, _ = aot.compile_for(jax.jit(noise), jax.random.key(0), 2.0)
    assert compiled.in_avals[0][1].weak_type


@pytest.mark.target
def test_a_program_that_needs_a_gpu_to_compile_raises_a_one_line_error(h200):
    with pytest.raises(TargetError, match=r"cannot be compiled without a GPU: .*cusolver.*") as error:
        aot.compile_for(jax.jit(lambda x: jnp.linalg.qr(x)[0]), jnp.ones((8, 8)))
    assert "\n" not in str(error.value)


WITHOUT_MOSAIC = """
import os, jax
from jax.experimental.pallas import mosaic_gpu
from jgraph.xla import aot

def double(x, out):
    out[...] = x[...] * 2

x = jax.ShapeDtypeStruct((128,), "float32")
aot.devices()
del os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"]
aot.compile_for(jax.jit(mosaic_gpu.kernel(double, out_type=x, grid=(1,), grid_names=("i",))), x)
"""


@pytest.mark.long
@pytest.mark.target
def test_a_mosaic_kernel_without_its_library_raises_an_error_with_the_install_command(h200):
    # Runs in a new process, because a loaded library stays loaded.
    run = subprocess.run([sys.executable, "-c", WITHOUT_MOSAIC], capture_output=True, text=True, check=False)
    assert "TargetError: kernels of Mosaic need" in run.stderr
    assert run.stderr.rstrip().endswith("run python -m jgraph.aot install")


@pytest.mark.target
def test_an_option_unknown_to_xla_raises_an_option_error(h200):
    with pytest.raises(CompilerOptionError, match="xla_nope"):
        aot.compile_for(jax.jit(jnp.sin), 1.0, compiler_options={"xla_nope": 1})


@pytest.mark.target
def test_compiling_without_a_dump_is_refused(h200):
    with pytest.raises(TargetError, match="dumped no thunks"):
        aot.compile_for(jax.jit(jnp.sin), 1.0, compiler_options={"xla_enable_dumping": False})


def test_a_missing_plugin_raises_an_error_with_the_install_command(tmp_path):
    with pytest.raises(TargetError, match=r"in .*nothing; run python -m jgraph.aot install"):
        aot.devices(directory=tmp_path / "nothing")


def test_a_library_that_is_not_a_plugin_is_refused(tmp_path):
    library = tmp_path / "jax_plugins" / "xla_cuda13" / "xla_cuda_plugin.so"
    library.parent.mkdir(parents=True)
    library.write_text("no library")
    with pytest.raises(TargetError, match="does not fit jaxlib"):
        aot.devices(directory=tmp_path)


def test_the_plugin_cache_follows_xdg_and_is_separate_for_each_jax_version(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert aot.cache_directory() == tmp_path / "jgraph" / "target" / f"jax-{jax.__version__}"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(aot.cache_directory()).startswith("/home/someone/.cache/jgraph/")


MOSAIC = "jax_cuda13_plugin/libmosaic_gpu_runtime.so"


@pytest.fixture
def pip(monkeypatch):
    """Replaces pip with a fake that writes both libraries, or fails with `error`."""

    def fake(command, **kwargs):
        fake.runs += 1
        if fake.error:
            return subprocess.CompletedProcess(command, 1, "", fake.error)
        assert {package.partition("==")[0] for package in command if "==" in package} == {
            "jax-cuda13-pjrt",
            "jax-cuda13-plugin",
        }
        target = aot.Path(command[command.index("--target") + 1])
        for file in (MOSAIC, "jax_plugins/xla_cuda13/xla_cuda_plugin.so"):
            (target / file).parent.mkdir(parents=True)
            (target / file).write_text("library")
        return subprocess.CompletedProcess(command, 0, "", "")

    fake.error, fake.runs = "", 0
    monkeypatch.setattr(aot.subprocess, "run", fake)
    return fake


def test_installing_twice_downloads_once(pip, tmp_path):
    directory = tmp_path / "plugin"
    assert aot.install(directory) == aot.install(directory) == aot.find_library(directory)
    assert pip.runs == 1
    assert (directory / MOSAIC).is_file()
    assert [p.name for p in tmp_path.iterdir()] == ["plugin"]


def test_concurrent_installs_leave_one_complete_plugin(pip, tmp_path):
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: aot.install(tmp_path / "plugin"), range(8)))
    assert found == {aot.find_library(tmp_path / "plugin")}
    assert (tmp_path / "plugin" / MOSAIC).is_file()
    assert [p.name for p in tmp_path.iterdir()] == ["plugin"]


def test_a_failed_download_leaves_no_files_and_reports_the_error_of_pip(pip, tmp_path):
    pip.error = "no network"
    with pytest.raises(TargetError, match="no network"):
        aot.install(tmp_path / "plugin")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_other_files_is_refused_and_unchanged(pip, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(TargetError, match="has other files than the plugin"):
        aot.install(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_the_command_line_prints_a_one_line_error(tmp_path, capsys):
    assert main(["show", "--directory", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jgraph.aot: error: no CUDA plugin")
    assert error.count("\n") == 1


@pytest.mark.skipif(bool(importlib.util.find_spec("jax_plugins")), reason="the environment has a plugin of its own")
def test_the_public_topology_function_requires_a_registered_plugin():
    """If this fails, jax can describe a GPU from a library alone: use that in `_compile_only_devices`."""
    with pytest.raises(NotImplementedError, match="topology not implemented for cuda"):
        topologies.get_topology_desc("", "cuda", target_config="", topology="1x1x1")
