"""Compile for an H200, H100 or B200 on a machine without one, so that capture and donation can be tested anywhere.

    python -m jgraph.aot install     # 133 MB, once for each jax version

NVIDIA's PJRT plugin holds XLA's GPU compiler, which needs a description of the device and not the device. The plugin lies in a
cache of its own: installed into the environment without NVIDIA's libraries, it makes every start of jax print a stack trace.
Beside it lies the one library that kernels of Pallas' Mosaic are linked with.

Kernels of Pallas are compiled, Triton's and Mosaic's. Programs that call cuDNN attention, cuSOLVER or Python cannot be compiled
this way, and matrix products come out untuned: nothing compiled here says anything about time.
"""

import contextlib
import functools
import importlib.metadata
import importlib.resources
import os
import platform
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax

from jgraph.device import DEVICES
from jgraph.errors import TargetError, os_errors
from jgraph.xla.cache import for_elsewhere, user_cache
from jgraph.xla.capture import CaptureReport, compile_and_report
from jgraph.xla.options import option_errors

Device: TypeAlias = Any  # jax.Device, which a type checker takes for a variable
PyTree: TypeAlias = Any

_LIBRARY = "xla_cuda_plugin.so"
_MOSAIC = "jax_cuda13_plugin/libmosaic_gpu_runtime.so"
GPUS = tuple(device.aot for device in DEVICES if device.aot)
"""GPUs that can be compiled for. Each has its description beside this file."""


def devices(count: int = 1, *, gpu: str = "h200", directory: Path | None = None) -> list[Device]:
    """Returns GPUs of one host that programs can be compiled for, but not run on. `jax.devices()` stays as it is.

    Args:
        count: how many; the same ones at every call.
        gpu: which, one of `GPUS`.
        directory: where the plugin was installed; the default cache if None.

    Raises:
        TargetError: no such GPU is described, the plugin is not installed, or it does not fit this jax.
    """
    if gpu not in GPUS:
        raise TargetError(f"no GPU is described as {gpu!r}: take one of {', '.join(GPUS)}", field="gpu")
    library = find_library(directory)
    if library is None:
        where = directory or cache_directory()
        raise TargetError(
            f"no CUDA plugin for jaxlib {version()} in the environment or in {where}; run python -m jgraph.aot install"
        )
    return list(_compile_only_devices(str(library), gpu, count))


def compile_for(
    jitted: object,
    *args: object,
    gpu: str = "h200",
    compiler_options: Mapping[str, str | bool | int | float] | None = None,
) -> tuple[jax.stages.Compiled, CaptureReport]:
    """Compiles a jitted function for a GPU that is not here; returns the program, and what of it XLA captures.

    Args:
        jitted, args: from `jax.jit`, and its arguments as `placed` takes them.
        gpu: one of `GPUS`.
        compiler_options: as `jgraph.xla.compiler_options` returns them.

    Raises:
        CompilerOptionError: XLA refuses an option.
        TargetError: no such GPU, no plugin, or the program needs a GPU to be compiled.
    """
    assert isinstance(jitted, jax.stages.Wrapped), "compile_for takes what jax.jit returns"
    avals = placed(args, gpu=gpu)
    with lowering_for(gpu):
        lowered = jitted.lower(*avals)
    return compile_lowered(lowered, compiler_options or {})


def placed(args: PyTree, *, gpu: str = "h200") -> PyTree:
    """Returns arguments as shapes on a GPU that is not here. Raises TargetError as `devices` does.

    Args:
        args: pytrees of arrays, numbers or `jax.ShapeDtypeStruct`; only shapes and dtypes are read. A ShapeDtypeStruct that
            has a sharding keeps it, everything else is placed on the first device.
    """
    sharding = jax.sharding.SingleDeviceSharding(devices(gpu=gpu)[0])

    def place(leaf: Any) -> jax.ShapeDtypeStruct:
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None:
            return leaf
        aval: Any = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)

    return jax.tree.map(place, args)


def compile_lowered(
    lowered: jax.stages.Lowered, compiler_options: Mapping[str, str | bool | int | float]
) -> tuple[jax.stages.Compiled, CaptureReport]:
    """Compiles what was lowered for `placed` arguments; the second half of `compile_for`, which raises the same."""
    with needs_no_gpu(), option_errors(), for_elsewhere():
        compiled, report = compile_and_report(lowered, compiler_options, platform="gpu")
    if report is None:
        raise TargetError("XLA wrote down no thunks; remove dump options (xla_dump_..., xla_enable_dumping) from XLA_FLAGS")
    return compiled, report


@contextlib.contextmanager
def lowering_for(gpu: str) -> Iterator[None]:
    """Traces and lowers for a GPU that is not here: around `.trace(...)`, `.lower(...)`, with `placed` arguments.

    A Pallas kernel asks which GPU it is lowered for. The answer is the abstract device of the mesh in context, which keeps its
    axes. Errors are those of `needs_no_gpu`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    device = jax.sharding.AbstractDevice(devices(gpu=gpu)[0].device_kind, None, "cuda")
    mesh = jax.sharding.AbstractMesh(mesh.axis_sizes, mesh.axis_names, mesh.axis_types, abstract_device=device)
    with needs_no_gpu(), jax.sharding.use_abstract_mesh(mesh):
        yield


@contextlib.contextmanager
def needs_no_gpu() -> Iterator[None]:
    """Turns errors of lowering and compiling what only a GPU's own software can supply into a TargetError."""
    try:
        yield
    except RuntimeError as e:  # of jax and of XLA
        if "MOSAIC_GPU_RUNTIME_LIB_PATH" not in os.environ and "mosaic" in str(e).lower():
            raise TargetError(f"kernels of Mosaic need {_MOSAIC}: run python -m jgraph.aot install") from e
        raise TargetError(f"this program cannot be compiled without a GPU: {str(e).partition(chr(10))[0]}") from e


def cache_directory() -> Path:
    """Returns where `install` puts the plugin unless told otherwise: one directory for each jaxlib version."""
    return user_cache() / "target" / f"jax-{version()}"


def find_library(directory: Path | None = None) -> Path | None:
    """Returns the plugin's shared library: in `directory` if given, else of the environment (on a GPU machine) or the cache."""
    places = [directory] if directory else [*map(Path, sys.path), cache_directory()]
    found = (place / "jax_plugins" / name / _LIBRARY for place in places for name in ("xla_cuda13", "xla_cuda12"))
    return next((library for library in found if library.is_file()), None)


def install(directory: Path | None = None) -> Path:
    """Downloads the plugin for the installed jax, with pip, and what Mosaic needs, unless they are there; returns the plugin.

    Several processes may call it at once.

    Args:
        directory: where to, absent or empty; the default cache if None.

    Raises:
        TargetError: there is no plugin for this machine, pip failed, or the directory holds something else.
    """
    library = find_library(directory) or _install_plugin(directory or cache_directory())
    root = library.parents[2]
    # A plugin of the environment is not ours to complete: jax looks beside it for what Mosaic needs.
    if root == (directory or cache_directory()) and not (root / _MOSAIC).is_file():
        _install_mosaic(root)
    return library


def _install_plugin(final: Path) -> Path:
    if (sys.platform, platform.machine()) not in (("linux", "x86_64"), ("linux", "aarch64")):
        raise TargetError(f"NVIDIA's plugin exists for Linux only, not for {sys.platform} {platform.machine()}")
    with os_errors("directory", final):
        final.parent.mkdir(parents=True, exist_ok=True)
        # A sibling, so that the rename is atomic: other processes see the whole plugin or none of it.
        created = tempfile.TemporaryDirectory(prefix=f".{final.name}-", dir=final.parent)
    with created as scratch:
        new = Path(scratch) / "plugin"
        _pip("install", "jax-cuda13-pjrt", "--target", str(new))
        try:
            new.rename(final)
        except OSError as e:  # not empty: another process was faster, or the directory is someone's
            if find_library(final) is None:
                message = f"`directory` {final} holds something else than the plugin: name another, or empty it"
                raise TargetError(message, field="directory") from e
    library = find_library(final)
    assert library is not None, f"jax-cuda13-pjrt {version()} holds no {_LIBRARY}"
    return library


def _install_mosaic(root: Path) -> None:
    """Takes one library out of a wheel. The wheel's other files register kernels that only a running program calls."""
    with tempfile.TemporaryDirectory(prefix=f".{root.name}-", dir=root.parent) as scratch:
        _pip("download", "jax-cuda13-plugin", "--dest", scratch)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            extracted = Path(archive.extract(_MOSAIC, scratch))
        (root / _MOSAIC).parent.mkdir(exist_ok=True)
        extracted.replace(root / _MOSAIC)


def _pip(action: str, package: str, *args: str) -> None:
    command = [sys.executable, "-m", "pip", action, "--quiet", "--no-deps", "--disable-pip-version-check", *args]
    pip = subprocess.run([*command, f"{package}=={version()}"], capture_output=True, text=True, check=False)
    if pip.returncode:
        raise TargetError(f"pip could not {action} {package}=={version()}: {(pip.stderr or pip.stdout).strip()}")


@functools.cache
def _compile_only_devices(library: str, gpu: str, count: int) -> tuple[Device, ...]:
    """Devices of the description in GPU.textproto, through the plugin in `library`.

    `jax.experimental.topologies.get_topology_desc` is the public way. It asks jax's own registry for the plugin "cuda", and
    what is registered there becomes a backend that the next `jax.devices()` tries to start. So the plugin is loaded by the
    functions underneath, which are not public: everything that relies on them is this function and the next.
    """
    from jaxlib import xla_client

    description = importlib.resources.files("jgraph.xla").joinpath(f"{gpu}.textproto").read_text()
    try:
        api = _load_plugin(library)
        topology = xla_client.make_c_api_device_topology(api, "", target_config=description, topology=f"1x1x{count}")
        return tuple(topology._make_compile_only_devices())
    except (jax.errors.JaxRuntimeError, AttributeError, TypeError) as e:
        raise TargetError(f"the CUDA plugin {library} does not fit jaxlib {version()}: {e}") from e


@functools.cache
def _load_plugin(library: str) -> object:
    from jaxlib import xla_client

    # Not "cuda": jax gives that name to the plugin of a GPU that is really there, and a name can be taken once in a process.
    name = f"jgraph_target:{library}"
    api = xla_client.load_pjrt_plugin_dynamically(name, library)
    xla_client.initialize_pjrt_plugin(name)
    mosaic = Path(library).parents[2] / _MOSAIC
    if mosaic.is_file():
        # Mosaic reads it when it compiles; jax sets it itself where its own CUDA wheels are installed.
        os.environ.setdefault("MOSAIC_GPU_RUNTIME_LIB_PATH", str(mosaic))
    return api


def version() -> str:
    """Returns jaxlib's version, which the plugin's must be."""
    return importlib.metadata.version("jaxlib")
