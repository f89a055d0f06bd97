"""Checkpoints, written by Orbax in the background and verified by checksums.

Orbax writes into a temporary directory and renames it, so a process that is killed leaves complete checkpoints or none. A
checksum of the bits of every leaf, computed on the device before writing, detects later damage of the files.
"""

import contextlib
import errno
import functools
import gc
import logging
import math
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax import Array

from jgraph.checkpoint._digest import (
    DamagedError,
    Described,
    Digest,
    ReadFrozen,
    changed,
    check_step,
    checksums,
    describe,
    digest_of,
    like_key,
    mask,
    named,
    no_reader,
    placed,
    shown_shape,
    unseal,
)
from jgraph.errors import CheckpointError, JgraphError, require, shown
from jgraph.processes import all_gather_scalar, all_or_raise, is_process_zero
from jgraph.tree import key_data
from jgraph.types import Leaf, Tree

State = TypeVar("State", bound=Tree)
_T = TypeVar("_T")


@dataclass(frozen=True)
class Names:
    """The names of a caller's arguments in messages, and what to do about a checkpoint that does not fit."""

    directory: str = "directory"
    keep: str = "keep"
    restart: str = "use another `directory`"


_NAMES = Names()


# Orbax moves old checkpoints to this directory. It would otherwise delete them file by file, and a process that is killed could
# leave an incomplete checkpoint.
_TRASH = "deleted"
# The directory of the frozen leaves.
BASE = "base"


class Checkpoints:
    """Saves a state in the background and restores it. Keeps the last `keep` checkpoints, under `directory/STEP/`.

    A state is a pytree of arrays. Orbax's `CheckpointManager` writes the checkpoints. In addition, a checkpoint has a checksum
    of every leaf. A checkpoint is damaged if a file cannot be read or a checksum differs; `restore_latest` then restores the
    one before it. When a save completes, the list of leaves and the smallest leaf are read back. All processes of a run share
    one directory and call every method together. A training state that was saved as `TrainStep.canonical.of(state)` can be
    restored on other devices.

    Frozen leaves are written once, to `directory/base`, which is complete before the first checkpoint is written; or not at
    all, after a call of `refer`.

    Args:
        directory: Directory of the checkpoints; created if missing. Leftovers of an interrupted save are removed. Its absolute
            path must not contain `*`, `?`, `[` or a backslash, which Orbax would not take literally.
        keep: Largest number of checkpoints, at least 1. When a save completes, older ones are deleted.
        warn: Called by `restore_latest` with a message of one line for every damaged checkpoint that it skips. Its result is
            ignored.
        wait: Called by `save` with the checksums that the devices compute, a list of uint32 arrays, one per leaf. Must block
            until they are computed, and return the list. A program can pass a function that raises an error after a timeout.
        names: Names of the arguments in messages, for a program that has other arguments.
        frozen: Names of leaves that no step changes, such as `step.canonical.frozen`.
        read_frozen: Reads frozen leaves of checkpoints that refer to them. Called by all processes with the `source` of `refer`
            and a dict of `jax.ShapeDtypeStruct`s with shardings by leaf name. Must return arrays like these by name.

    Raises:
        ConfigError: If `keep` is not a positive integer, or `frozen` is a string.
        CheckpointError: If the directory cannot be created or written, or its path cannot be used.

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
        warn: Callable[[str], None] = warnings.warn,
        wait: Callable[[list[Array]], list[Array]] = jax.block_until_ready,
        names: Names = _NAMES,
        frozen: Collection[str] = (),
        read_frozen: ReadFrozen = no_reader,
    ):
        require(isinstance(keep, int) and keep > 0, "keep", repr(keep), "a positive integer")
        require(not isinstance(frozen, str), "frozen", repr(frozen), "names of leaves, such as step.canonical.frozen")
        self._directory = Path(directory).absolute()
        self._keep = keep
        self._warn = warn
        self._wait = wait
        self._names = names
        self._frozen = frozenset(frozen)
        self._read_frozen = read_frozen
        self._base_crc: int | None = None  # None before the first save
        self._unread: tuple[int, Digest] | None = None  # step and digest of a save that was not read back yet
        check_path(self._directory, names=names)
        with self._write_errors():
            self._directory.mkdir(parents=True, exist_ok=True)
            self._empty_trash()
            self._manager = self._open()

    @property
    def latest_step(self) -> int | None:
        """The step of the newest checkpoint, which may be damaged or still being written; None if there is none. A property."""
        return self._manager.latest_step()

    def check_space(self, state: Tree) -> None:
        """Checks that the disk has room for `keep` checkpoints and for one that is being written. Writes nothing.

        The checkpoints that are already in the directory need no more room. For each of the others, the free bytes of the disk
        must suffice for the bytes of all leaves. Frozen leaves count once, or not at all after a call of `refer`. A leaf that
        is sharded over devices or processes counts in full.

        Args:
            state: Pytree of arrays or `jax.ShapeDtypeStruct`s, with the shapes and dtypes of the state to save.

        Raises:
            CheckpointError: If there is not enough room.
        """
        count = self._keep + 1 - len(self._manager.all_steps())
        is_written = bool(self._frozen) and self._base.latest_step is not None
        frozen_count = 0 if is_written else 1
        check_space(self._directory, state, count, names=self._names, frozen=self._frozen, frozen_count=frozen_count)

    def refer(self, source: str, leaves: Mapping[str, Array]) -> None:
        """Makes the checkpoints refer to the frozen leaves in `source`, such as a folder, instead of storing them.

        Writes the checksums of the frozen leaves to `directory/base`. `restore_latest` reads the leaves with `read_frozen` and
        compares. Call it before the first `save`.

        Args:
            source: The first argument of `read_frozen`. Stored as it is, so use an absolute path.
            leaves: Arrays by leaf name, as `read_frozen` returns them: all frozen leaves. Others are ignored.

        Raises:
            ConfigError: If a frozen leaf is missing.
            CheckpointError: If there is a checkpoint already, or the checksums cannot be written.
        """
        missing = self._frozen - leaves.keys()
        require(not missing, "leaves", f"without {min(missing, default='')}", "all frozen leaves")
        if self.latest_step is not None:
            raise CheckpointError(f"{self._directory} has a checkpoint: its frozen leaves cannot be replaced")
        self._base._remove()  # of an earlier run that ended before its first checkpoint
        self._base._save(0, {name: leaf for name, leaf in leaves.items() if name in self._frozen}, source)
        self._base.wait()
        with self._write_errors():
            self._base_crc = self._base._digest(0)["crc"]

    def save(self, step: int, state: Tree) -> None:
        """Starts to write a checkpoint in the background. After the call, the caller may donate the arrays of the state.

        Blocks until the previous checkpoint is written, the checksums are computed and the arrays are copied to the host.

        Args:
            step: Number of completed steps, larger than every saved step. A smaller or equal number has no effect.
            state: Pytree of arrays. Its structure is not saved, only the names (paths) of the leaves.

        Raises:
            CheckpointError: If this checkpoint cannot be written, or the previous one cannot be written or read back. An error
                of the background write is raised by the next call of `save`, `wait` or `close`.
        """
        _check_leaves("state", state, "must have arrays only, e.g. jnp.asarray(1)")
        if self.latest_step != step:
            self._save(step, named(state))

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
                if a checkpoint was saved for another step than the name of its directory; or if a damaged checkpoint cannot be
                renamed.
        """
        _check_leaves("like", like, "must have arrays or jax.ShapeDtypeStruct, e.g. step.canonical.shapes()")
        leaves = named(like)
        damaged: dict[int, str] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                restored = self._restore(step, leaves)
            except DamagedError as e:
                damaged[step] = str(e)
                continue
            for bad, reason in sorted(damaged.items(), reverse=True):
                self._warn(
                    f"checkpoint {self._directory / str(bad)} is damaged ({reason}): "
                    f"continuing from step {step}; it is kept as damaged-{bad}"
                )
            self._set_aside(damaged)
            return step, jax.tree.unflatten(jax.tree.structure(like), [restored[name] for name in leaves])
        if damaged:
            names = "; ".join(f"{self._directory / str(step)} ({reason})" for step, reason in damaged.items())
            raise CheckpointError(f"every checkpoint is damaged: {names}; restore one, or {self._names.restart}")
        return None

    def wait(self) -> None:
        """Waits until all saves are on disk. Returns at once if none is being written.

        Raises:
            CheckpointError: If a save could not be written or read back.
        """
        with self._write_errors():
            self._finish()
            self._empty_trash()

    def close(self) -> None:
        """Waits until all saves are on disk, then ends Orbax's threads. The object cannot be used afterwards.

        Raises:
            CheckpointError: If a save could not be written or read back. The threads are ended first.
        """
        try:
            self.wait()
        finally:
            # `wait` raises the error of the last save. Closing would raise it again.
            with contextlib.suppress(Exception):
                self._manager.close()
                if "_base" in vars(self):
                    self._base.close()

    @functools.cached_property
    def _base(self) -> "Checkpoints":
        """The frozen leaves, as a checkpoint of step 0 in a directory of its own."""
        return Checkpoints(
            self._directory / BASE, 1, warn=self._warn, wait=self._wait, names=self._names, read_frozen=self._read_frozen
        )

    def _save(self, step: int, state: dict[str, Leaf], source: str = "") -> None:
        """Saves a state, or only its digest if the leaves are in `source`."""
        frozen = {name: leaf for name, leaf in state.items() if name in self._frozen}
        base = self._save_base(frozen) if frozen else None
        changing = {name: leaf for name, leaf in state.items() if name not in frozen}
        with self._write_errors():
            # Orbax stores the integers of a random key. Its implementation is in the digest, as the dtype.
            leaves = list(map(key_data, changing.values()))
            digest = digest_of(changing, checksums(leaves, self._wait), step=step, base=base, source=source)
            items: dict[str, Any] = {"digest": ocp.args.JsonSave(digest)}  # pyright: ignore[reportCallIssue]
            if not source:
                items["state"] = ocp.args.PyTreeSave(leaves)  # pyright: ignore[reportCallIssue]
            self._finish()
            if self._manager.save(step, args=ocp.args.Composite(**items)) and not source:
                self._unread = step, digest
            self._empty_trash()

    def _save_base(self, frozen: dict[str, Leaf]) -> int:
        """Writes the frozen leaves before the first checkpoint. Returns the checksum of their digest."""
        if self._base_crc is None:
            if self.latest_step is None:
                # An earlier run may have written it, perhaps with other weights, and ended before its first checkpoint.
                self._base._remove()
            self._base_crc = self._base._save_once(frozen)
        return self._base_crc

    def _save_once(self, state: dict[str, Leaf]) -> int:
        """Writes the only checkpoint, unless it exists, and waits for it. Returns the checksum of its digest."""
        if self.latest_step is None:
            self._save(0, state)
            self.wait()
        found, _ = _attempt(lambda: self._digest(0))
        if found and "source" in found:
            return found["crc"]  # not compared, because the layout of a run may have changed a negative zero
        sums = checksums(list(map(key_data, state.values())), self._wait)
        expected = digest_of(state, sums, step=0)
        if any(all_gather_scalar(found != expected)):
            raise CheckpointError(f"{self._directory} does not hold the frozen leaves of this run; {self._names.restart}")
        return expected["crc"]

    def _remove(self) -> None:
        """Deletes all checkpoints."""
        for step in self._manager.all_steps():
            self._manager.delete(step)
        self._empty_trash()

    def _open(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(max_to_keep=self._keep, cleanup_tmp_directories=True, todelete_subdir=_TRASH)
        return ocp.CheckpointManager(self._directory, options=options)

    def _finish(self) -> None:
        """Waits for the save in the background, and reads the list of leaves and the smallest leaf back."""
        # Reading all leaves would take as long as writing them. The list of leaves and the smallest leaf show that the files
        # can be found and opened; `restore_latest` verifies the rest. Only process 0 reads, without Orbax's barriers, because
        # `close` runs after an error of one process too.
        unread, self._unread = self._unread, None
        self._manager.wait_until_finished()
        self._manager.check_for_errors()
        if unread is None or not is_process_zero():
            return
        step, digest = unread
        path = self._manager.directory / str(step)
        sizes = [math.prod(leaf["shape"]) for leaf in digest["leaves"]]
        leaves: list[Any] = [ocp.PLACEHOLDER] * len(sizes)
        leaves[sizes.index(min(sizes))] = 0
        how = ocp.args.PyTreeRestore(leaves, restore_args=[ocp.RestoreArgs(restore_type=np.ndarray)] * len(sizes))  # pyright: ignore[reportCallIssue]
        _, reason = _attempt(lambda: ocp.PyTreeCheckpointHandler().restore(path / "state", args=how))
        found, why = _attempt(lambda: ocp.JsonCheckpointHandler().restore(path / "digest"))
        if reason or found != digest:
            reason = reason or why or "its digest differs"
            where = f"`{self._names.directory}`: checkpoint {path}"
            raise CheckpointError(f"{where} was written but cannot be read back: {reason}; check the disk")

    def _restore(self, step: int, like: dict[str, Leaf]) -> dict[str, Array]:
        digest = self._digest(step)
        expected = unseal(digest)
        saved = digest["leaves"]
        check_step(self._directory / str(step), digest)
        own = {leaf["name"] for leaf in saved}
        frozen = {name: leaf for name, leaf in like.items() if name not in own} if "base" in digest else {}
        like = {name: leaf for name, leaf in like.items() if name not in frozen}
        self._check_fits(step, saved, describe(like))
        like = {leaf["name"]: like[leaf["name"]] for leaf in saved}
        leaves = list(map(placed, like.values()))
        source = digest.get("source")
        if source is None:
            restore_args = ocp.checkpoint_utils.construct_restore_args(leaves)
            restored = self._read(step, "state", ocp.args.PyTreeRestore(leaves, restore_args=restore_args))  # pyright: ignore[reportCallIssue]
        else:
            arrays = self._read_frozen(source, dict(zip(like, leaves, strict=True)))
            restored = [arrays[name] for name in like]
        for leaf, stored, actual in zip(saved, expected, checksums(restored), strict=True):
            if actual & mask(digest) != stored:
                if source is not None:
                    raise changed(self._directory, source, leaf["name"], actual, stored)
                raise DamagedError(f"{leaf['name']} has checksum {actual:08x}, not {stored:08x}")
        found = {name: like_key(leaf, array) for (name, leaf), array in zip(like.items(), restored, strict=True)}
        return found | (self._base._restore_once(frozen, digest["base"]) if "base" in digest else {})

    def _restore_once(self, like: dict[str, Leaf], crc: int) -> dict[str, Array]:
        """Restores the only checkpoint, whose digest has the checksum `crc`."""
        try:
            unseal(digest := self._digest(0))
            if digest["crc"] != crc:
                raise DamagedError("it holds the frozen leaves of another run")
            return self._restore(0, like)
        except DamagedError as e:
            raise DamagedError(f"{self._directory}: {e}") from e

    def _digest(self, step: int) -> Digest:
        return self._read(step, "digest", ocp.args.JsonRestore())  # pyright: ignore[reportCallIssue]

    def _read(self, step: int, name: str, how: ocp.args.CheckpointArgs) -> Any:
        restored, reason = _attempt(lambda: self._manager.restore(step, args=ocp.args.Composite(**{name: how}))[name])
        # A process reads only its own shards, so a single process may detect the damage.
        if any(all_gather_scalar(bool(reason))):
            raise DamagedError(f"{name} cannot be read: {reason or 'another process reports an error'}")
        return restored

    def _check_fits(self, step: int, found: list[Described], expected: list[Described]) -> None:
        saved, required = ({leaf["name"]: leaf for leaf in leaves} for leaves in (found, expected))
        differing = [
            f"{name}: {shown_shape(saved.get(name))} in the checkpoint, {shown_shape(required.get(name))} in this run"
            for name in saved | required
            if saved.get(name) != required.get(name)
        ]
        if differing:
            more = f" and {len(differing) - 4} more" if len(differing) > 4 else ""
            raise CheckpointError(
                f"checkpoint {self._directory / str(step)} does not fit this run: {'; '.join(differing[:4])}{more}; "
                f"{self._names.restart}"
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
        """Converts errors of the disk, raised here or in Orbax's threads, to CheckpointError."""
        # A save may raise the error of the previous save.
        names = self._names
        prefix = f"`{names.directory}`: checkpoints in {self._directory} cannot be written"
        try:
            yield
        except JgraphError:
            raise
        except Exception as e:
            if _has_code(e, errno.ENOSPC, errno.EDQUOT):
                why = f"no space left on the disk; free some, name another `{names.directory}`, or lower `{names.keep}`"
            elif _has_code(e, errno.EFBIG):
                why = "a file is larger than the disk or the limit of this process (`ulimit -f`) allows"
            else:
                why = f"{first_line(e)}; check `{names.directory}`"
            raise CheckpointError(f"{prefix}: {why}") from e


def _attempt(read: Callable[[], _T]) -> tuple[_T | None, str]:
    """Returns the result of a function that reads files, and "" or the reason why it failed."""
    # Orbax, TensorStore and JSON raise different errors for damaged files. Python prints tracebacks for the coroutines of a
    # failed read when it collects them. The error is not returned, because it would keep them alive.
    result = None
    reason = ""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: None
    try:
        try:
            result = read()
        except Exception as e:
            reason = first_line(e)
        if reason:
            gc.collect()
    finally:
        sys.unraisablehook = hook
    return result, reason


@functools.cache
def hide_tracebacks() -> None:
    """Hides the tracebacks that libraries log or print for a failed save. `Checkpoints` still raises its CheckpointError."""
    # The settings hold for all threads, until the process ends, so a program may call this function but a library should not.
    before = sys.unraisablehook

    def report(unraisable: "sys.UnraisableHookArgs") -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = report
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)  # arrays that were not begun


def check_path(directory: Path, refused: str = "*?[\\", *, names: Names = _NAMES) -> None:
    """Raises CheckpointError if a path has characters that Orbax or TensorStore do not take literally."""
    # Orbax finds the files of a save by a glob: `run*` finds those of `run1` too, and `run[1]` finds none. It reads without a
    # glob. TensorStore takes a backslash for a slash, and requires UTF-8.
    found = [letter for letter in refused if letter in str(directory)]
    found += ["a byte that is not UTF-8"] if re.search("[\ud800-\udfff]", str(directory)) else []
    if found:
        wrong = f"its path has {' and '.join(found)}; rename the directory"
        raise CheckpointError(f"`{names.directory}`: checkpoints in {directory} could not be restored: {wrong}")


def check_space(
    directory: Path,
    state: Tree,
    count: int,
    *,
    names: Names = _NAMES,
    frozen: Collection[str] = (),
    frozen_count: Literal[0, 1] = 1,
) -> None:
    """Raises CheckpointError if `count` copies of a state have more bytes than are free on the disk of a directory.

    There are `frozen_count` copies of the leaves with the names `frozen`.
    """
    # An array that is sharded over devices counts in full. A missing directory counts as its nearest existing parent.
    sizes = {name: leaf.size * leaf.dtype.itemsize for name, leaf in named(state).items()}
    needed = sum(size * (frozen_count if name in frozen else count) for name, size in sizes.items())
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise CheckpointError(
            f"`{names.directory}`: {directory} needs {needed:,} bytes for {count} checkpoints, and {free:,} are free on its "
            f"disk; free some space, name another `{names.directory}`, or lower `{names.keep}`"
        )


def _has_code(error: BaseException, *codes: int) -> bool:
    # TensorStore has the code in its message only.
    names = [name for code in codes for name in (os.strerror(code), errno.errorcode[code])]
    seen: BaseException | None = error
    while seen is not None:
        if (isinstance(seen, OSError) and seen.errno in codes) or any(name in str(seen) for name in names):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _check_leaves(field: str, tree: Tree, must: str) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            at = f" at {jax.tree_util.keystr(path)}" if path else ""
            raise CheckpointError(f"`{field}` has a leaf {shown(leaf)}{at}: {must}", field=field)


def first_line(error: BaseException) -> str:
    """Returns the first line of the message of an error, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
