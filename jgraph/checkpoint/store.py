"""Checkpoints, written by Orbax in the background and verified by checksums.

Orbax writes into a temporary directory and renames it, so a process that is killed leaves complete checkpoints or none. A
checksum of the bits of every leaf, computed on the device before writing, detects later damage of the files.
"""

import contextlib
import errno
import functools
import gc
import json
import logging
import os
import shutil
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import Array
from jax.sharding import SingleDeviceSharding

from jgraph.errors import CheckpointError, JgraphError, require
from jgraph.processes import all_gather_scalar, all_or_raise, is_process_zero

State = TypeVar("State")

# Orbax moves old checkpoints to this directory. It would otherwise delete them file by file, and a process that is killed could
# leave an incomplete checkpoint.
_TRASH = "deleted"


class Checkpoints:
    """Saves a state in the background and restores it. Keeps the last `keep` checkpoints, under `directory/STEP/`.

    A state is a pytree of arrays. Orbax's `CheckpointManager` writes the checkpoints. In addition, a checkpoint has a checksum
    of every leaf. A checkpoint is damaged if a file cannot be read or a checksum differs; `restore_latest` then restores the
    one before it. All processes of a run share one directory and call every method together. A training state that was saved as
    `TrainStep.canonical.of(state)` can be restored on other devices.

    Args:
        directory: Directory of the checkpoints; created if missing. Leftovers of an interrupted save are removed.
        keep: Largest number of checkpoints, at least 1. When a save completes, older ones are deleted.
        warn: Called by `restore_latest` with a message of one line for every damaged checkpoint that it skips. Its result is
            ignored.
        wait: Called by `save` with the checksums that the devices compute, a list of uint32 scalars, one per leaf. Must block
            until they are computed, and return the list. A program can pass a function that raises an error after a timeout.

    Raises:
        ConfigError: If `keep` is not a positive integer.
        CheckpointError: If the directory cannot be created or written.

    Examples:
        >>> import tempfile
        >>> checkpoints = jgraph.Checkpoints(Path(tempfile.mkdtemp()), keep=2)
        >>> checkpoints.save(100, {"w": jnp.ones(3)})
        >>> checkpoints.wait()
        >>> checkpoints.restore_latest({"w": jax.ShapeDtypeStruct((3,), jnp.float32)})
        (100, {'w': Array([1., 1., 1.], dtype=float32)})
        >>> checkpoints.close()
    """

    def __init__(
        self,
        directory: Path,
        keep: int,
        *,
        warn: Callable[[str], object] = warnings.warn,
        wait: Callable[[list[Array]], list[Array]] = jax.block_until_ready,
    ):
        require(isinstance(keep, int) and keep > 0, "keep", repr(keep), "a positive integer")
        self._directory = Path(directory).absolute()
        self._keep, self._warn, self._wait = keep, warn, wait
        with self._write_errors():
            self._directory.mkdir(parents=True, exist_ok=True)
            self._empty_trash()
            self._manager = self._open()

    @property
    def latest_step(self) -> int | None:
        """The step of the newest checkpoint, which may be damaged or still being written; None if there is none. A property."""
        return self._manager.latest_step()

    def check_space(self, state: object) -> None:
        """Checks that the disk has room for `keep` checkpoints and for one that is being written. Writes nothing.

        The checkpoints that are already in the directory need no more room. For each of the others, the free bytes of the disk
        must suffice for the bytes of all leaves. A leaf that is sharded over devices or processes counts in full.

        Args:
            state: Pytree of arrays or `jax.ShapeDtypeStruct`s, with the shapes and dtypes of the state to save.

        Raises:
            CheckpointError: If there is not enough room.
        """
        check_space(self._directory, state, self._keep + 1 - len(self._manager.all_steps()))

    def save(self, step: int, state: object) -> None:
        """Starts to write a checkpoint in the background. After the call, the caller may donate the arrays of the state.

        Blocks until the previous checkpoint is written, the checksums are computed and the arrays are copied to the host.

        Args:
            step: Number of completed steps, larger than every saved step. A smaller or equal number has no effect.
            state: Pytree of arrays. Its structure is not saved, only the names (paths) of the leaves.

        Raises:
            CheckpointError: If this or the previous checkpoint cannot be written. An error of the background write is raised by
                the next call of `save`, `wait` or `close`.
        """
        if self.latest_step == step:
            return
        with self._write_errors():
            leaves, described = jax.tree.leaves(state), _describe(state)
            sums = checksums(leaves, self._wait)
            # The digest has a checksum too, so that a flipped digit in it is not reported as another model.
            digest = {"leaves": described, "checksums": sums, "crc": _crc(described, sums)}
            args = ocp.args.Composite(
                state=ocp.args.PyTreeSave(leaves),  # pyright: ignore[reportCallIssue]
                digest=ocp.args.JsonSave(digest),  # pyright: ignore[reportCallIssue]
            )
            self._manager.save(step, args=args)
            self._empty_trash()

    def restore_latest(self, like: State) -> tuple[int, State] | None:
        """Restores the newest checkpoint that is not damaged, and verifies its checksums.

        For each newer checkpoint that is damaged, calls the function `warn` of the constructor and renames the directory of the
        checkpoint to `damaged-STEP`. If every checkpoint is damaged, renames none.

        Args:
            like: Pytree of arrays or `jax.ShapeDtypeStruct`s with the names, shapes and dtypes of the saved leaves. Not
                changed.

        Returns:
            The step, and a state of new arrays with the structure and shardings of `like`; a leaf without a sharding is on the
            first device. None if there is no checkpoint.

        Raises:
            CheckpointError: If every checkpoint is damaged; if the saved leaves have other names, shapes or dtypes than `like`;
                or if a damaged checkpoint cannot be renamed.
        """
        damaged: dict[int, str] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                state = self._restore(step, like)
            except _DamagedError as e:
                damaged[step] = str(e)
                continue
            for bad, reason in sorted(damaged.items(), reverse=True):
                self._warn(
                    f"checkpoint {self._directory / str(bad)} is damaged ({reason}): "
                    f"continuing from step {step}; it is kept as damaged-{bad}"
                )
            self._set_aside(damaged)
            return step, state
        if damaged:
            names = "; ".join(f"{self._directory / str(step)} ({reason})" for step, reason in damaged.items())
            raise CheckpointError(f"every checkpoint is damaged: {names}; restore one, or start over with `resume` off")
        return None

    def wait(self) -> None:
        """Waits until all saves are on disk. Returns at once if none is being written.

        Raises:
            CheckpointError: If a save could not be written.
        """
        with self._write_errors():
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
            self._empty_trash()

    def close(self) -> None:
        """Waits until all saves are on disk, then ends Orbax's threads. The object cannot be used afterwards.

        Raises:
            CheckpointError: If a save could not be written. The threads are ended first.
        """
        try:
            self.wait()
        finally:
            # `wait` raises the error of the last save. Closing would raise it again.
            with contextlib.suppress(Exception):
                self._manager.close()

    def _open(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(max_to_keep=self._keep, cleanup_tmp_directories=True, todelete_subdir=_TRASH)
        return ocp.CheckpointManager(self._directory, options=options)

    def _restore(self, step: int, like: State) -> State:
        leaves = [_placed(leaf) for leaf in jax.tree.leaves(like)]
        digest = self._read(step, "digest", ocp.args.JsonRestore())  # pyright: ignore[reportCallIssue]
        expected, saved = _unseal(digest), digest["leaves"]
        self._check_fits(step, saved, _describe(like))
        restore_args = ocp.checkpoint_utils.construct_restore_args(leaves)
        restored = self._read(step, "state", ocp.args.PyTreeRestore(leaves, restore_args=restore_args))  # pyright: ignore[reportCallIssue]
        for leaf, stored, actual in zip(saved, expected, checksums(restored), strict=True):
            if stored != actual:
                raise _DamagedError(f"{leaf['name']} has checksum {actual:08x}, not {stored:08x}")
        return jax.tree.unflatten(jax.tree.structure(like), restored)

    def _read(self, step: int, name: str, how: Any) -> Any:
        restored, reason = None, ""
        with _hidden_garbage():
            # Orbax, TensorStore and JSON raise different errors for damaged files.
            try:
                restored = self._manager.restore(step, args=ocp.args.Composite(**{name: how}))[name]
            except Exception as e:
                reason = f"{name} cannot be read: {_first_line(e)}"
        # A process reads only its own shards, so a single process may detect the damage.
        if any(all_gather_scalar(bool(reason))):
            # Not raised from `e`: its traceback would keep alive the coroutines that `_hidden_garbage` collects.
            raise _DamagedError(reason or f"{name} cannot be read by another process")
        return restored

    def _check_fits(self, step: int, found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
        saved, required = ({leaf["name"]: leaf for leaf in leaves} for leaves in (found, expected))
        differing = [
            f"{name}: {_shape(saved.get(name))} in the checkpoint, {_shape(required.get(name))} in this run"
            for name in saved | required
            if saved.get(name) != required.get(name)
        ]
        if differing:
            more = f" and {len(differing) - 4} more" if len(differing) > 4 else ""
            raise CheckpointError(
                f"checkpoint {self._directory / str(step)} does not fit this run: {'; '.join(differing[:4])}{more}; "
                "use another `run_dir` or `resume` off"
            )

    def _set_aside(self, damaged: dict[int, str]) -> None:
        if not damaged:
            return
        with self._write_errors():
            self._manager.close()
            with all_or_raise():
                for step in damaged if is_process_zero() else ():
                    target = self._directory / f"damaged-{step}"
                    shutil.rmtree(target, ignore_errors=True)
                    (self._directory / str(step)).rename(target)
            self._manager = self._open()

    def _empty_trash(self) -> None:
        trash = self._directory / _TRASH
        for old in trash.iterdir() if is_process_zero() and trash.exists() else ():
            shutil.rmtree(old, ignore_errors=True)

    @contextlib.contextmanager
    def _write_errors(self) -> Iterator[None]:
        """Converts errors of the disk, raised here or in Orbax's threads, to CheckpointError.

        A save may raise the error of the previous save.
        """
        prefix = f"`run_dir`: checkpoints in {self._directory} cannot be written"
        try:
            yield
        except JgraphError:
            raise
        except Exception as e:
            if _has_code(e, errno.ENOSPC, errno.EDQUOT):
                why = "no space left on the disk; free some, name another `run_dir`, or lower `checkpoint_keep`"
            elif _has_code(e, errno.EFBIG):
                why = "a file is larger than the disk or the limit of this process (`ulimit -f`) allows"
            else:
                why = f"{_first_line(e)}; check `run_dir`"
            raise CheckpointError(f"{prefix}: {why}") from e


class CheckpointReader:
    """Reads single leaves of a checkpoint by name, and verifies their checksums. Writes nothing.

    The name of a leaf is its path in the saved state in the form of `jax.tree_util.keystr`, for example
    `.params['norm']['scale']`. All processes of a run call every method together.

    Attributes:
        step: The step of the checkpoint.

    Args:
        directory: Directory of the checkpoints, with one subdirectory per step.
        step: Step of the checkpoint; None for the newest.
        field: Name of the caller's argument for the step. Errors name it.

    Raises:
        CheckpointError: If there is no checkpoint, there is none of this step, or the checkpoint's list of leaves is damaged.
    """

    def __init__(self, directory: Path, step: int | None = None, *, field: str = "step"):
        self._directory, self._field = Path(directory).absolute(), field
        if not self._directory.is_dir():
            raise CheckpointError(f"{directory}: there is no checkpoint yet")
        # Orbax warns if read_only is set without the other options.
        options = ocp.CheckpointManagerOptions(read_only=True, save_interval_steps=0, create=False)
        self._manager = ocp.CheckpointManager(self._directory, options=options)
        steps = sorted(self._manager.all_steps())
        if not steps:
            raise CheckpointError(f"{directory}: there is no checkpoint yet")
        if step not in (None, *steps):
            raise CheckpointError(f"`{field}` is {step}: must be one of {', '.join(map(str, steps))}", field=field)
        self.step = steps[-1] if step is None else step
        digest = self._restore("digest", ocp.args.JsonRestore())  # pyright: ignore[reportCallIssue]
        try:
            self._sums = _unseal(digest)
        except _DamagedError as e:
            raise self._damaged(str(e)) from e
        self._leaves = {leaf["name"]: (number, leaf) for number, leaf in enumerate(digest["leaves"])}

    def read(self, name: str) -> np.ndarray:
        """Returns a whole leaf on the host, with its saved shape and dtype. Collective: every process must call it.

        Args:
            name: Name of the leaf.

        Raises:
            CheckpointError: If the checkpoint has no such leaf, or its data is damaged.
        """
        _, saved = self._leaf(name)
        here = SingleDeviceSharding(jax.local_devices()[0])
        like = jax.ShapeDtypeStruct(tuple(saved["shape"]), jnp.dtype(saved["dtype"]), sharding=here)
        return np.asarray(self.place({name: like})[name])

    def place(self, like: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Array]:
        """Reads several leaves to devices. Collective: all processes call it together, and each reads only its own shards.

        Args:
            like: The shape and sharding of each leaf to read, by the name of the leaf. A leaf without a sharding is placed on
                the first device. The dtypes of `like` are ignored.

        Returns:
            The arrays by name, in their saved dtypes.

        Raises:
            CheckpointError: If a name in `like` is not in the checkpoint, or a leaf has another shape than in `like` or is
                damaged.
            ConfigError: If this process can read its shards, and another process cannot.
        """
        leaves: list[Any] = [ocp.PLACEHOLDER] * len(self._leaves)
        restore_args = [ocp.RestoreArgs()] * len(self._leaves)
        for name, leaf in like.items():
            number, saved = self._leaf(name)
            if tuple(saved["shape"]) != leaf.shape:
                where, shapes = self._directory / str(self.step), f"{saved['shape']} in it and {list(leaf.shape)} in this run"
                raise CheckpointError(f"checkpoint {where} does not fit this run: {name} has shape {shapes}", field=self._field)
            aval = _placed(jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(saved["dtype"]), sharding=leaf.sharding))
            leaves[number], restore_args[number] = aval, ocp.ArrayRestoreArgs(sharding=aval.sharding, dtype=aval.dtype)
        with all_or_raise():
            found = self._restore("state", ocp.args.PyTreeRestore(leaves, restore_args=restore_args))  # pyright: ignore[reportCallIssue]
        arrays = {name: found[self._leaf(name)[0]] for name in like}
        for name, actual in zip(arrays, checksums(list(arrays.values())), strict=True):
            if actual != (expected := self._sums[self._leaf(name)[0]]):
                raise self._damaged(f"{name} has checksum {actual:08x}, not {expected:08x}")
        return arrays

    def _leaf(self, name: str) -> tuple[int, dict[str, Any]]:
        if name not in self._leaves:
            raise CheckpointError(f"checkpoint {self._directory / str(self.step)} has no {name}")
        return self._leaves[name]

    def close(self) -> None:
        """Ends Orbax's threads. The reader cannot be used afterwards."""
        self._manager.close()

    def _restore(self, name: str, how: Any) -> Any:
        try:
            return self._manager.restore(self.step, args=ocp.args.Composite(**{name: how}))[name]
        except Exception as e:  # Orbax, TensorStore and JSON raise different errors for damaged files
            raise self._damaged(f"{name} cannot be read: {_first_line(e)}") from e

    def _damaged(self, why: str) -> CheckpointError:
        where = self._directory / str(self.step)
        return CheckpointError(f"checkpoint {where} is damaged ({why}); name another `{self._field}`", field=self._field)


class _DamagedError(Exception):
    """A checkpoint is damaged. The message is the reason."""


@contextlib.contextmanager
def _hidden_garbage() -> Iterator[None]:
    """Hides the tracebacks that Python prints for the coroutines of a failed read when it collects them."""
    before = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: None
    try:
        yield
        gc.collect()
    finally:
        sys.unraisablehook = before


@functools.cache
def hide_tracebacks() -> None:
    """Hides the tracebacks that libraries log or print for a failed save. `Checkpoints` still raises its CheckpointError.

    Sets the loggers `absl` and `asyncio` to the level CRITICAL. Replaces `sys.unraisablehook`, to hide the error "Event loop is
    closed". Ignores the RuntimeWarning that a coroutine was never awaited. The settings hold for all threads, until the process
    ends, so a program may call this function but a library should not. Later calls have no effect.
    """
    before = sys.unraisablehook

    def report(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = report
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)  # arrays that were not begun


def check_space(directory: Path, state: object, count: int) -> None:
    """Checks that a disk has room for several copies of a state. Writes nothing.

    Args:
        directory: A directory on the disk. If missing, its nearest existing parent is used.
        state: Pytree of arrays or `jax.ShapeDtypeStruct`s. An array that is sharded over devices counts in full.
        count: Number of copies.

    Raises:
        CheckpointError: If the copies have more bytes than are free on the disk.
    """
    leaves = jax.tree.leaves(state)
    needed = count * sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise CheckpointError(
            f"`run_dir`: {directory} needs {needed:,} bytes for {count} checkpoints, and {free:,} are free on its disk; "
            "free some space, name another `run_dir`, or lower `checkpoint_keep`"
        )


def _has_code(error: BaseException, *codes: int) -> bool:
    """Returns True if an error, or one of its causes, has one of these codes of the operating system."""
    # TensorStore has the code in its message only.
    names = [name for code in codes for name in (os.strerror(code), errno.errorcode[code])]
    seen: BaseException | None = error
    while seen is not None:
        if (isinstance(seen, OSError) and seen.errno in codes) or any(name in str(seen) for name in names):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def checksums(leaves: list[Array], wait: Callable[[list[Array]], list[Array]] = jax.block_until_ready) -> list[int]:
    """Computes a 32-bit checksum of the bits and positions of the elements of each leaf, on the devices.

    Blocks until the checksums are on the host.

    Args:
        leaves: Arrays of a boolean, integer or floating-point dtype of at most 32 bits, with any sharding. Not donated.
        wait: Called once with the checksums on the devices, a list of uint32 scalars. Must block until they are computed, and
            return the list.

    Returns:
        One integer in [0, 2**32) per leaf, in the same order. It does not depend on the sharding. Every change of a single
        element changes it.
    """
    return [int(checksum) for checksum in jax.device_get(wait(_checksums(leaves)))]


def _checksum(leaf: Array) -> Array:
    # A sum of integers does not depend on the order or the device. The factors are odd and have inverses modulo 2**32, so a
    # change of one element changes the sum.
    words = leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf
    words = jax.lax.bitcast_convert_type(words, jnp.dtype(f"uint{8 * words.dtype.itemsize}")).astype(jnp.uint32)
    # Positions are computed axis by axis, because flattening would reshard a leaf on several devices.
    place, stride = jnp.zeros(words.shape, jnp.uint32), 1
    for axis in reversed(range(words.ndim)):
        place += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= words.shape[axis]
    return jnp.sum(words * (2 * place + 1), dtype=jnp.uint32)


# One program for all leaves, so that XLA combines the collectives of all sums. It compiles in 2 s on two cores for the
# 226 leaves of GPT 124M and an H200; a program for each shape took 0.9 s.
_checksums = jax.jit(lambda leaves: [_checksum(leaf) for leaf in leaves])


def _describe(state: object) -> list[dict[str, Any]]:
    paths = jax.tree_util.tree_leaves_with_path(state)
    return [{"name": jax.tree_util.keystr(path), "dtype": str(leaf.dtype), "shape": list(leaf.shape)} for path, leaf in paths]


def _unseal(digest: Any) -> list[int]:
    """Returns the checksums in a digest. Raises _DamagedError if the digest is damaged."""
    try:
        if digest["crc"] == _crc(digest["leaves"], digest["checksums"]):
            return digest["checksums"]
    except (KeyError, TypeError, RecursionError) as e:
        raise _DamagedError("its digest is incomplete") from e
    raise _DamagedError("its digest does not match its checksum")


def _crc(leaves: object, sums: object) -> int:
    return zlib.crc32(json.dumps([leaves, sums], sort_keys=True).encode())


def _shape(leaf: dict[str, Any] | None) -> str:
    return f"{leaf['dtype']}{leaf['shape']}" if leaf else "absent"


def _placed(leaf: Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the shape of a leaf with its sharding; the first device if it has none."""
    sharding = getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _first_line(error: BaseException) -> str:
    """Returns the first line of the message of an error, or the name of its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
