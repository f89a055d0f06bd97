"""Compiles programs for an H200, H100 or B200 on a machine without one, to test capture and donation anywhere.

    python -m jgraph.aot install     # 133 MB, once for each jax version

NVIDIA's PJRT plugin contains XLA's GPU compiler, which needs a description of the device but not the device. The plugin is
installed into its own cache directory: in the environment, without NVIDIA's libraries, JAX would print a stack trace at every
start. The same directory holds the library that Pallas Mosaic kernels are linked with.

Pallas kernels can be compiled, for one generation of GPUs per process. Programs with cuDNN attention, cuSOLVER or Python
callbacks cannot. Matmuls are not autotuned, so do not estimate time from the result.
"""

import contextlib
import functools
import importlib.metadata
import importlib.resources
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import jax
import numpy as np

from jgraph.device import DEVICES
from jgraph.errors import TargetError, os_errors
from jgraph.mesh import with_target
from jgraph.types import JaxDevice, Tree
from jgraph.xla._capture import CaptureReport, compile_and_report
from jgraph.xla.cache import UNREADABLE, user_cache
from jgraph.xla.donation import without_warning
from jgraph.xla.options import OptionValue

_Args = TypeVar("_Args")
_Leaf = TypeVar("_Leaf")

_LIBRARY = "xla_cuda_plugin.so"
_MOSAIC = "jax_cuda13_plugin/libmosaic_gpu_runtime.so"
GPUS = tuple(device.aot for device in DEVICES if device.aot)
"""GPUs that can be compiled for. Each has a description in this directory."""


def devices(count: int = 1, *, gpu: str = "h200", directory: Path | None = None) -> list[JaxDevice]:
    """Returns compile-only GPUs of one host, for meshes and shardings. They hold no arrays; `jax.devices()` lacks them."""
    if gpu not in GPUS:
        raise TargetError(f"no GPU is described as {gpu!r}: take one of {', '.join(GPUS)}", field="gpu")
    library = find_library(directory)
    if library is None:
        place = directory or cache_directory()
        raise TargetError(
            f"no CUDA plugin for jaxlib {version()} in the environment or in {place}; run python -m jgraph.aot install"
        )
    return list(_compile_only_devices(str(library), gpu, count))


def compile_for(
    jitted: jax.stages.Wrapped,
    *args: Any,
    gpu: str = "h200",
    compiler_options: Mapping[str, OptionValue] | None = None,
) -> tuple[jax.stages.Compiled, CaptureReport]:
    """Compiles a jitted function for a GPU that is not present. The program cannot be called here."""
    return compile_lowered(lower(jitted, args, gpu=gpu)[1], compiler_options or {})


def lower(
    jitted: jax.stages.Wrapped, args: Sequence[Tree], *, gpu: str = "h200"
) -> tuple[jax.stages.Traced, jax.stages.Lowered]:
    """Traces and lowers a jitted function for a GPU that is not present. Raises TargetError if that is not possible."""
    with lowering_for(gpu):
        traced = jitted.trace(*moved(args, gpu=gpu))
        # Tracing may compute constants, which this device cannot do.
        with jax.default_device(devices(gpu=gpu)[0]):
            return traced, traced.lower()


def moved(args: _Args, *, gpu: str = "h200") -> _Args:
    """Replaces arrays that are committed to present devices by shapes, sharded over as many GPUs if they are on a mesh."""

    def is_committed(leaf: Any) -> TypeGuard[jax.Array]:
        return isinstance(leaf, jax.Array) and leaf.committed

    def move(leaf: jax.Array | _Leaf) -> jax.Array | jax.ShapeDtypeStruct | _Leaf:
        if not is_committed(leaf):
            return leaf
        aval: Any = jax.typeof(leaf)  # a key has no `weak_type` itself
        sharding = leaf.sharding
        if isinstance(sharding, jax.sharding.NamedSharding):
            sharding = jax.sharding.NamedSharding(_mesh_of(sharding.mesh, gpu), sharding.spec)
        else:
            sharding = None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=aval.weak_type, sharding=sharding)

    # Unflattening copies modules, so shared parts of a Flax model would become different ones.
    return jax.tree.map(move, args) if any(map(is_committed, jax.tree.leaves(args))) else args


def _mesh_of(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, gpu: str) -> jax.sharding.Mesh:
    """Returns a mesh of GPUs that are not present, with the axes of a mesh of present devices."""
    gpus = np.array(devices(mesh.size, gpu=gpu)).reshape(mesh.axis_sizes)
    return jax.sharding.Mesh(gpus, mesh.axis_names, axis_types=mesh.axis_types)


def is_on_mesh(args: Sequence[Tree]) -> bool:
    """True if an array of `args` is on a mesh of present devices."""
    leaves = (leaf for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.Array))
    return any(isinstance(leaf.sharding, jax.sharding.NamedSharding) for leaf in leaves)


def released(
    jitted: jax.stages.Wrapped, args: Sequence[Tree], *, gpu: str = "h200"
) -> tuple[jax.stages.Wrapped, Sequence[jax.ShapeDtypeStruct]]:
    """Releases a program that names one present device in its shardings, so that `lower` can lower it for another.

    Returns a function with the same donated arguments and no static ones, and the shapes of its arguments.
    """
    # A mesh from `jax.set_mesh` must be that of the shardings.
    with _needs_no_gpu() if jax.sharding.get_mesh().axis_names else lowering_for(gpu):
        traced = jitted.trace(*args)
        leaves, structure = jax.tree.flatten(traced.args_info)
        # Kernels of Pallas are custom calls without guarantees, which only matter for a program that is stored.
        calls = set(re.findall(r"custom_call @([\w.$]+)", traced.lower(lowering_platforms=("cuda",)).as_text()))
        checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in calls]
        # Shardings on a mesh of present devices, of `jax.jit` or in the function, choose the device. `jax.export` drops them.
        exported = jax.export.export(jitted, platforms=["cuda"], disabled_checks=checks)(*args)
    if exported.nr_devices > 1:
        raise TargetError(
            f"the program names {exported.nr_devices} present devices in its shardings: build its mesh from "
            f"jgraph.xla.aot.devices({exported.nr_devices}) and pass shapes with shardings on this mesh"
        )

    def call(*leaves: jax.Array) -> Tree:
        args, kwargs = jax.tree.unflatten(structure, leaves)
        return exported.call(*args, **kwargs)

    donated = [i for i, leaf in enumerate(leaves) if leaf.donated]
    return jax.jit(call, donate_argnums=donated), [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]


def compile_lowered(
    lowered: jax.stages.Lowered, compiler_options: Mapping[str, OptionValue]
) -> tuple[jax.stages.Compiled, CaptureReport]:
    """Compiles a program from `lower`, or lowered inside `lowering_for`. It cannot be called here."""
    with _needs_no_gpu(), without_warning(UNREADABLE):
        compiled, report = compile_and_report(lowered, compiler_options, platform="gpu")
    used = {device for sharding in jax.tree.leaves(compiled.input_shardings) for device in sharding.device_set}
    if used & set(jax.devices()):
        raise TargetError("the program names present devices in its shardings: pass arguments on their mesh (jax.device_put)")
    if report is None:
        raise TargetError("XLA dumped no thunks; remove dump options (xla_dump_..., xla_enable_dumping) from XLA_FLAGS")
    return compiled, report


@contextlib.contextmanager
def lowering_for(gpu: str) -> Iterator[None]:
    """Makes JAX trace and lower for a GPU that is not present, inside a `with` block. Pass arguments from `moved`."""
    concrete = jax.sharding.get_mesh()
    if concrete.axis_names:  # from `jax.set_mesh`
        with _needs_no_gpu(), jax.set_mesh(_mesh_of(concrete, gpu)):
            yield
        return
    with _needs_no_gpu(), jax.sharding.use_abstract_mesh(with_target(devices(gpu=gpu)[0].device_kind)):
        yield


@contextlib.contextmanager
def _needs_no_gpu() -> Iterator[None]:
    """Converts errors of programs that cannot be lowered or compiled without a GPU into a TargetError."""
    try:
        yield
    except RuntimeError as e:
        if "MOSAIC_GPU_RUNTIME_LIB_PATH" not in os.environ and "mosaic" in str(e).lower():
            remedy = f"remove {cache_directory()} and run python -m jgraph.aot install"
            raise TargetError(f"kernels of Mosaic need {_MOSAIC}: {remedy}") from e
        raise TargetError(f"this program cannot be compiled without a GPU: {str(e).partition(chr(10))[0]}") from e


def cache_directory() -> Path:
    """Returns the default directory of `install`, e.g. `~/.cache/jgraph/target/jax-0.11.2`. Does not create it."""
    return user_cache() / "target" / f"jax-{version()}"


def find_library(directory: Path | None = None) -> Path | None:
    """Finds NVIDIA's PJRT plugin: only in `directory` if given, otherwise on `sys.path` and then in `cache_directory()`."""
    places = [directory] if directory else [*map(Path, sys.path), cache_directory()]
    found = (place / "jax_plugins" / name / _LIBRARY for place in places for name in ("xla_cuda13", "xla_cuda12"))
    return next((library for library in found if library.is_file()), None)


def install(directory: Path | None = None) -> Path:
    """Installs NVIDIA's PJRT plugin and the library of Pallas Mosaic for the installed jaxlib, unless the plugin is found."""
    if library := find_library(directory):
        return library
    if (sys.platform, platform.machine()) not in (("linux", "x86_64"), ("linux", "aarch64")):
        raise TargetError(f"NVIDIA's plugin exists for Linux only, not for {sys.platform} {platform.machine()}")
    final = directory or cache_directory()
    with os_errors("directory", final):
        final.parent.mkdir(parents=True, exist_ok=True)
        # In the same directory, so that the rename is atomic: several processes may install, and a failure leaves no files.
        created = tempfile.TemporaryDirectory(prefix=f".{final.name}-", dir=final.parent)
    with created as scratch:
        new = Path(scratch) / "plugin"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
        packages = [f"{package}=={version()}" for package in ("jax-cuda13-pjrt", "jax-cuda13-plugin")]
        pip = subprocess.run([*command, "--target", str(new), *packages], capture_output=True, text=True, check=False)
        if pip.returncode:
            raise TargetError(f"pip could not install {' '.join(packages)}: {(pip.stderr or pip.stdout).strip()}")
        with contextlib.suppress(OSError):  # not empty: another process was faster, or the directory has another use
            new.rename(final)
    if library := find_library(final):
        return library
    raise TargetError(
        f"`directory` is {final}, which has other files than the plugin: must be empty or absent", field="directory"
    )


@functools.cache
def _compile_only_devices(library: str, gpu: str, count: int) -> tuple[JaxDevice, ...]:
    """Returns compile-only devices for the description in GPU.textproto, from the plugin `library`."""
    from jaxlib import xla_client

    description = _description(gpu)
    # The public `jax.experimental.topologies.get_topology_desc` takes the plugin from JAX's registry, where it becomes a
    # backend that the next `jax.devices()` tries to start. Therefore this function and the next use private ones of jaxlib.
    try:
        api = _load_plugin(library)
        topology = xla_client.make_c_api_device_topology(api, "", target_config=description, topology=f"1x1x{count}")
        return tuple(topology._make_compile_only_devices())
    except (jax.errors.JaxRuntimeError, AttributeError, TypeError) as e:
        raise TargetError(f"the CUDA plugin {library} does not fit jaxlib {version()}: {e}") from e


def _description(gpu: str) -> str:
    return importlib.resources.files("jgraph.xla").joinpath(f"{gpu}.textproto").read_text()


def memory_of(gpu: str) -> int:
    """Returns the bytes of memory in the description of a GPU, as its driver reports them."""
    found = re.search(r"\bdevice_memory_size: (\d+)", _description(gpu))
    assert found is not None, "a description has the memory"
    return int(found[1])


@functools.cache
def _load_plugin(library: str) -> object:
    from jaxlib import xla_client

    # A name can be registered once in a process, and JAX registers the plugin of a present GPU as "cuda".
    name = f"jgraph_target:{library}"
    api = xla_client.load_pjrt_plugin_dynamically(name, library)
    xla_client.initialize_pjrt_plugin(name)
    mosaic = Path(library).parents[2] / _MOSAIC
    if mosaic.is_file():
        # Mosaic reads this variable when it compiles. JAX sets it only if its CUDA wheels are installed.
        os.environ.setdefault("MOSAIC_GPU_RUNTIME_LIB_PATH", str(mosaic))
    return api


def version() -> str:
    """Returns the version of the installed jaxlib, e.g. `0.11.2`. The plugin must have the same version."""
    return importlib.metadata.version("jaxlib")
