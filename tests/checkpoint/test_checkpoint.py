import contextlib
import errno
import itertools
import json
import shutil
import zlib
from functools import partial, reduce
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jgraph.checkpoint import CheckpointReader, store
from jgraph.checkpoint._digest import DamagedError, checksums, unseal
from jgraph.checkpoint.store import Checkpoints, check_space
from jgraph.errors import CheckpointError, ConfigError


def make_state(seed: int = 0) -> dict:
    key = jax.random.key(seed)
    return {
        "a": jax.random.normal(key, (300, 40)),
        "b": (jax.random.normal(key, (17,), jnp.bfloat16), jnp.arange(5)),
        "step": jnp.int32(seed),
    }


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert checksums(jax.tree.leaves(a)) == checksums(jax.tree.leaves(b))


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def open_checkpoints(tmp_path, warnings):
    opened = []

    def open_(keep: int = 2) -> Checkpoints:
        opened.append(Checkpoints(tmp_path / "checkpoints", keep, warn=warnings.append))
        return opened[-1]

    yield open_
    for checkpoints in opened:
        checkpoints.close()


@pytest.fixture
def directory(open_checkpoints, tmp_path):
    """Returns a directory with the states of seeds 1 and 2 as steps 1 and 2."""
    checkpoints = open_checkpoints()
    checkpoints.save(1, make_state(1))
    checkpoints.save(2, make_state(2))
    checkpoints.close()
    return tmp_path / "checkpoints"


def flip_a_byte(directory):
    largest = largest_file(directory)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)


def truncate(directory):
    largest = largest_file(directory)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])


def delete_largest(directory):
    largest_file(directory).unlink()


def empty_directory(directory):
    shutil.rmtree(directory)
    directory.mkdir()


def change_a_checksum(directory):
    path = directory / "digest" / "metadata"
    digest = json.loads(path.read_text())
    digest["checksums"][0] += 1
    path.write_text(json.dumps(digest))


def garble_the_digest(directory):
    (directory / "digest" / "metadata").write_text('{"leaves": ')


def nest_the_digest(directory):
    (directory / "digest" / "metadata").write_text('{"leaves": ' + 200_000 * "[" + 200_000 * "]" + "}")


def largest_file(directory):
    return max((path for path in directory.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


DAMAGES = [flip_a_byte, truncate, delete_largest, empty_directory, change_a_checksum, garble_the_digest, nest_the_digest]


def test_errors_name_the_arguments_of_the_caller(open_checkpoints, tmp_path):
    checkpoints = open_checkpoints()
    checkpoints.save(1, {"w": jnp.ones(2)})
    with pytest.raises(CheckpointError, match=r"`like` has a leaf of type method: must .* step.canonical.shapes"):
        checkpoints.restore_latest(checkpoints.restore_latest)
    with pytest.raises(CheckpointError, match=r"`state` has a leaf 'x' at \['a'\]: must have arrays"):
        checkpoints.save(2, {"a": "x"})
    other = {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}
    with pytest.raises(CheckpointError, match=r"does not fit .*; use another `directory`$"):
        checkpoints.restore_latest(other)
    own = Checkpoints(tmp_path / "checkpoints", 2, names=store.Names("out", "copies", "pass `fresh`"))
    with pytest.raises(CheckpointError, match=r"does not fit .*; pass `fresh`$"):
        own.restore_latest(other)
    own.close()


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_are_restored_with_their_implementation(open_checkpoints, tmp_path, impl):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    keys = jax.device_put(jax.random.split(jax.random.key(3, impl=impl)), NamedSharding(mesh, PartitionSpec("data")))
    rest = {"key": jax.random.key(7, impl=impl), "w": jnp.ones(2)}
    state = jax.device_put(rest, NamedSharding(mesh, PartitionSpec())) | {"keys": keys}
    checkpoints = open_checkpoints()
    checkpoints.save(1, state)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    _, restored = checkpoints.restore_latest(shapes)
    for name in ("key", "keys"):
        assert restored[name].dtype == state[name].dtype
        assert restored[name].sharding.is_equivalent_to(state[name].sharding, state[name].ndim)
        np.testing.assert_array_equal(jax.random.key_data(restored[name]), jax.random.key_data(state[name]))
    with contextlib.closing(CheckpointReader(tmp_path / "checkpoints")) as reader:
        assert reader.place({"['key']": shapes["key"]})["['key']"] == state["key"]
    other = shapes | {"key": jax.eval_shape(lambda: jax.random.key(7, impl="unsafe_rbg"))}
    with pytest.raises(CheckpointError, match=r"key<\w+>\[\] in the checkpoint, key<urbg>\[\]"):
        checkpoints.restore_latest(other)


def test_a_state_is_restored_bit_for_bit(open_checkpoints, directory):
    step, state = open_checkpoints().restore_latest(jax.eval_shape(make_state))
    assert step == 2
    assert_same(state, make_state(2))


def test_restoring_from_an_empty_directory_returns_none(open_checkpoints):
    assert open_checkpoints().restore_latest(make_state()) is None


def test_only_the_last_checkpoints_are_kept(open_checkpoints, tmp_path):
    checkpoints = open_checkpoints(keep=2)
    for step in range(1, 6):
        checkpoints.save(step, make_state(step))
    checkpoints.close()
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names - {"deleted"} == {"4", "5"}
    assert not list((tmp_path / "checkpoints").glob("deleted/*"))


def test_the_state_can_be_donated_while_it_is_written(open_checkpoints):
    @partial(jax.jit, donate_argnums=0)
    def step(state):
        return jax.tree.map(lambda x: -2 * x, state)

    state = make_state(3)
    checkpoints = open_checkpoints()
    checkpoints.save(1, state)
    for _ in range(20):
        state = step(state)
    checkpoints.wait()
    # If a step had overwritten the bytes, the checksums would differ.
    assert_same(checkpoints.restore_latest(state)[1], make_state(3))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_restored(open_checkpoints, directory, warnings, damage):
    damage(directory / "2")
    checkpoints = open_checkpoints()
    step, state = checkpoints.restore_latest(make_state())
    assert step == 1
    assert_same(state, make_state(1))
    assert len(warnings) == 1
    assert str(directory / "2") in warnings[0]
    assert "\n" not in warnings[0]


def test_a_run_can_replace_a_damaged_checkpoint(open_checkpoints, directory, warnings):
    flip_a_byte(directory / "2")
    checkpoints = open_checkpoints()
    checkpoints.restore_latest(make_state())
    checkpoints.save(2, make_state(22))
    checkpoints.close()
    assert (directory / "damaged-2").is_dir()
    assert_same(open_checkpoints().restore_latest(make_state())[1], make_state(22))
    assert len(warnings) == 1


def test_if_every_checkpoint_is_damaged_the_error_names_all_and_moves_none(open_checkpoints, directory, warnings):
    flip_a_byte(directory / "1")
    delete_largest(directory / "2")
    with pytest.raises(CheckpointError, match="every checkpoint is damaged") as e:
        open_checkpoints().restore_latest(make_state())
    assert str(directory / "1") in str(e.value)
    assert str(directory / "2") in str(e.value)
    assert "use another `directory`" in str(e.value)
    assert (directory / "1").is_dir()
    assert (directory / "2").is_dir()
    assert not warnings


def test_a_state_with_other_shapes_is_refused_with_the_differing_leaves(open_checkpoints, directory):
    other = make_state() | {"a": jnp.zeros((300, 41))}
    with pytest.raises(CheckpointError, match=r"does not fit.*'a'.*float32\[300, 40\].*float32\[300, 41\]"):
        open_checkpoints().restore_latest(other)


def test_leftovers_of_an_interrupted_save_are_ignored_and_removed(open_checkpoints, directory, warnings):
    shutil.copytree(directory / "2", directory / "3.orbax-checkpoint-tmp")
    checkpoints = open_checkpoints()
    assert checkpoints.restore_latest(make_state())[0] == 2
    checkpoints.save(3, make_state(3))
    checkpoints.close()
    assert not list(directory.glob("*tmp*"))
    assert not warnings


def test_saving_the_newest_step_again_has_no_effect(open_checkpoints, directory):
    checkpoints = open_checkpoints()
    checkpoints.save(2, make_state(99))
    checkpoints.wait()
    assert_same(checkpoints.restore_latest(make_state())[1], make_state(2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "float64", "int64"])
def test_a_change_of_one_bit_changes_the_checksum(dtype):
    unsigned = np.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")
    bits = 8 * unsigned.itemsize
    variants = np.tile(np.arange(1, 8, dtype=unsigned), (1 + 7 * 4, 1))
    for number, (i, bit) in enumerate(itertools.product(range(7), (0, 3, bits - 5, bits - 1)), start=1):
        variants[number, i] ^= unsigned.type(1) << unsigned.type(bit)
    with jax.enable_x64(bits == 64):
        leaves = list(jnp.asarray(variants.view(jnp.dtype(dtype))))
        sums = checksums(leaves)
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(dtype)}
    assert sums[0] not in sums[1:]


def test_swapped_words_of_an_element_change_the_checksum():
    with jax.enable_x64(True):
        assert len({*checksums([jnp.int64(1), jnp.int64(1 << 32)])}) == 2


def test_swapped_elements_change_the_checksum():
    x = jnp.arange(6.0)
    assert checksums([x]) != checksums([x[::-1]])


def test_space_is_checked_at_the_nearest_existing_directory(tmp_path):
    check_space(tmp_path / "not" / "yet", make_state(), 3)
    with pytest.raises(CheckpointError, match=r"needs .* bytes for 1000000000000 checkpoints"):
        check_space(tmp_path / "not" / "yet", make_state(), 10**12)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), ValueError("RESOURCE_EXHAUSTED: ... No space left on device [errno=28]")]
)
def test_a_full_disk_is_reported_from_every_error(open_checkpoints, monkeypatch, error):
    checkpoints = open_checkpoints()

    def fail(*args, **kwargs):
        raise RuntimeError("in a thread") from error

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints._manager, "save", fail)
        with pytest.raises(CheckpointError, match="no space left") as e:
            checkpoints.save(1, make_state())
    assert "`directory`" in str(e.value)
    assert "`keep`" in str(e.value)


@pytest.mark.parametrize(("keep", "saved"), [(2, 0), (1, 1)])
def test_space_is_needed_for_one_checkpoint_more_than_are_kept(open_checkpoints, monkeypatch, keep, saved):
    checkpoints, state = open_checkpoints(keep), {"w": jnp.zeros(100)}
    for step in range(saved):
        checkpoints.save(step, state)
    checkpoints.wait()
    count = keep + 1 - saved
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=400 * count))
    checkpoints.check_space(state)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=400 * count - 1))
    with pytest.raises(CheckpointError, match=f"needs {400 * count:,} bytes for {count} checkpoints"):
        checkpoints.check_space(state)


# --- Frozen leaves ---


def size_of(directory):
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


FROZEN = {"['w']"}


@pytest.fixture
def with_frozen(tmp_path):
    """Returns a function that opens checkpoints whose leaf `w` is frozen."""
    with contextlib.ExitStack() as stack:

        def opened(**settings):
            checkpoints = Checkpoints(tmp_path / "checkpoints", 2, **{"frozen": FROZEN} | settings)
            stack.callback(checkpoints.close)
            return checkpoints

        yield opened


def state_with_frozen(step, offset=0.0):
    noise = jax.random.normal(jax.random.key(0), (1000,))
    return {"step": jnp.int32(step), "w": noise + offset, "key": jax.random.key(step)}


def save_with_frozen(checkpoints, step, offset=0.0):
    checkpoints.save(step, state_with_frozen(step, offset))
    checkpoints.wait()


def test_frozen_leaves_are_written_once_and_restored_with_every_checkpoint(with_frozen, tmp_path):
    checkpoints = with_frozen()
    for step in (1, 2, 3):
        save_with_frozen(checkpoints, step)
    directory = tmp_path / "checkpoints"
    assert size_of(directory / "base") > 3600  # Orbax compresses
    assert size_of(directory / "3" / "state") < 3600
    # Also without the argument: the checkpoint says where its leaves are.
    for opened in (checkpoints, with_frozen(frozen=())):
        step, state = opened.restore_latest(state_with_frozen(0))
        assert step == 3
        assert jax.tree.structure(state) == jax.tree.structure(state_with_frozen(3))
        for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(state_with_frozen(3)), strict=True):
            assert (one == other).all()
    with contextlib.closing(CheckpointReader(directory)) as reader:
        np.testing.assert_array_equal(reader.read("['w']"), state_with_frozen(0)["w"])
        assert reader.read("['step']") == 3


def test_frozen_leaves_of_a_run_without_a_checkpoint_are_replaced(with_frozen, tmp_path):
    save_with_frozen(with_frozen(), 1)
    shutil.rmtree(tmp_path / "checkpoints" / "1")
    save_with_frozen(with_frozen(), 1, offset=1.0)
    _, state = with_frozen().restore_latest(state_with_frozen(0))
    np.testing.assert_array_equal(state["w"], state_with_frozen(0, offset=1.0)["w"])


def test_a_checkpoint_with_other_frozen_leaves_than_those_before_is_not_written(with_frozen):
    save_with_frozen(with_frozen(), 1)
    with pytest.raises(CheckpointError, match="base does not hold the frozen leaves of this run; use another `directory`"):
        save_with_frozen(with_frozen(), 2, offset=1.0)
    assert with_frozen().restore_latest(state_with_frozen(0))[0] == 1


@pytest.mark.parametrize("harm", ["removed", "of another run", *DAMAGES])
def test_checkpoints_whose_frozen_leaves_are_lost_say_so(with_frozen, tmp_path, harm):
    save_with_frozen(with_frozen(), 1)
    base, state = tmp_path / "checkpoints" / "base", state_with_frozen(0)
    if callable(harm):
        harm(base / "0")
    else:
        shutil.rmtree(base)
    if harm == "of another run":
        with contextlib.closing(Checkpoints(tmp_path / "other", 1, frozen=FROZEN)) as other:
            save_with_frozen(other, 1, offset=1.0)
        shutil.copytree(tmp_path / "other" / "base", base)
    with pytest.raises(CheckpointError, match=r"every checkpoint is damaged: .*base") as error:
        with_frozen().restore_latest(state)
    assert len(str(error.value).splitlines()) == 1
    with pytest.raises(CheckpointError, match=r"base.*(damaged|no checkpoint|another run)") as error:
        CheckpointReader(tmp_path / "checkpoints").read("['w']")
    assert len(str(error.value).splitlines()) == 1


def test_frozen_leaves_need_room_once(with_frozen, monkeypatch):
    checkpoints, state = with_frozen(), state_with_frozen(0)
    rest = sum(leaf.size * leaf.dtype.itemsize for name, leaf in state.items() if name != "w")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(CheckpointError, match=f"needs {4000 + 3 * rest:,} bytes for 3 checkpoints"):
        checkpoints.check_space(state)
    save_with_frozen(checkpoints, 1)
    with pytest.raises(CheckpointError, match=f"needs {2 * rest:,} bytes for 2 checkpoints"):
        checkpoints.check_space(state)


# --- Frozen leaves that stay where they are ---

PLACE = "/models/base"


@pytest.fixture
def referring(with_frozen):
    """Returns a function that opens checkpoints whose leaf `w` is in a dict, and the dict."""
    elsewhere = {"['w']": np.array(state_with_frozen(0)["w"])}

    def read(source, like):
        assert source == PLACE
        return {name: jax.device_put(elsewhere[name].copy(), leaf.sharding) for name, leaf in like.items()}

    return partial(with_frozen, read_frozen=read), elsewhere, read


def refer(checkpoints, elsewhere):
    checkpoints.refer(PLACE, {name: jnp.array(leaf) for name, leaf in elsewhere.items()})
    return checkpoints


def test_leaves_that_are_referred_to_are_not_written_and_restored(referring, tmp_path):
    opened, elsewhere, read = referring
    save_with_frozen(refer(opened(), elsewhere), 1)
    save_with_frozen(opened(), 2)
    directory = tmp_path / "checkpoints"
    assert size_of(directory / "base") < 1000
    step, state = opened(frozen=()).restore_latest(state_with_frozen(0))
    assert step == state["step"] == 2
    np.testing.assert_array_equal(state["w"], state_with_frozen(0)["w"])
    with contextlib.closing(CheckpointReader(directory, read_frozen=read)) as reader:
        np.testing.assert_array_equal(reader.read("['w']"), state_with_frozen(0)["w"])


def test_the_leaves_of_a_reference_may_have_any_order(tmp_path):
    state = {"a": jnp.zeros(3), "b": jnp.ones(3), "step": jnp.int32(1)}
    leaves = {"['b']": state["b"], "['a']": state["a"]}
    choices = {"frozen": leaves, "read_frozen": lambda source, like: leaves}
    with contextlib.closing(Checkpoints(tmp_path, 1, **choices)) as checkpoints:
        checkpoints.refer(PLACE, leaves)
        checkpoints.save(1, state)
        checkpoints.wait()
        assert_same(checkpoints.restore_latest(state)[1], state)


def test_the_source_counts_if_a_layout_has_changed_a_negative_zero(referring):
    opened, elsewhere, _ = referring
    elsewhere["['w']"][0] = -0.0
    checkpoints = refer(opened(), elsewhere)
    checkpoints.save(1, state_with_frozen(1) | {"w": jnp.asarray(elsewhere["['w']"]).at[0].set(0.0)})
    checkpoints.wait()
    save_with_frozen(opened(), 2)
    _, state = opened().restore_latest(state_with_frozen(0))
    assert np.signbit(state["w"][0])


@pytest.mark.parametrize("place", [0, 999])
def test_a_changed_source_is_refused_and_no_checkpoint_is_set_aside(referring, tmp_path, place):
    opened, elsewhere, read = referring
    save_with_frozen(refer(opened(), elsewhere), 1)
    elsewhere["['w']"][place] = np.nextafter(elsewhere["['w']"][place], 9)
    wrong = rf"base refers to the weights in {PLACE}, which have changed: \['w'\] has checksum .*; put the old files back"
    with pytest.raises(CheckpointError, match=wrong):
        opened().restore_latest(state_with_frozen(0))
    with contextlib.closing(CheckpointReader(tmp_path / "checkpoints", read_frozen=read)) as reader:
        assert reader.read("['step']") == 1
        with pytest.raises(CheckpointError, match=wrong):
            reader.read("['w']")
    elsewhere["['w']"][:] = state_with_frozen(0)["w"]
    assert opened().restore_latest(state_with_frozen(0))[0] == 1


def test_a_checkpoint_that_refers_to_leaves_needs_their_reader(referring, with_frozen):
    opened, elsewhere, _ = referring
    save_with_frozen(refer(opened(), elsewhere), 1)
    with pytest.raises(CheckpointError, match=f"`read_frozen` is missing: .* not in the checkpoint, but in {PLACE}"):
        with_frozen().restore_latest(state_with_frozen(0))


def test_a_reference_replaces_that_of_a_run_without_a_checkpoint(referring):
    opened, elsewhere, _ = referring
    refer(opened(), elsewhere)
    elsewhere["['w']"][0] = 7.0
    save_with_frozen(refer(opened(), elsewhere), 1)
    assert opened().restore_latest(state_with_frozen(0))[1]["w"][0] == 7.0
    with pytest.raises(CheckpointError, match="has a checkpoint: its frozen leaves cannot be replaced"):
        refer(opened(), elsewhere)
    with pytest.raises(ConfigError, match=r"`leaves` is without \['w'\]: must be all frozen leaves"):
        refer(opened(), {})


def test_leaves_that_are_referred_to_need_no_room(referring, monkeypatch):
    checkpoints = refer(referring[0](), referring[1])
    rest = sum(leaf.size * leaf.dtype.itemsize for name, leaf in state_with_frozen(0).items() if name != "w")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(CheckpointError, match=f"needs {3 * rest:,} bytes for 3 checkpoints"):
        checkpoints.check_space(state_with_frozen(0))


# --- Saving ---


@pytest.mark.parametrize("name", ["[1]", "a[b", "*", "a?", "a\\b", "\udc80"])
def test_a_path_that_is_not_taken_literally_is_refused_before_anything_is_written(tmp_path, name):
    with pytest.raises(CheckpointError, match="could not be restored: its path has ") as error:
        Checkpoints(tmp_path / name / "checkpoints", 1)
    assert len(str(error.value).splitlines()) == 1
    assert not any(tmp_path.iterdir())


def test_other_characters_of_a_path_are_taken_literally(tmp_path):
    state = {"w": jnp.arange(3)}
    with contextlib.closing(Checkpoints(tmp_path / "a]b %41#é{x}$~'\n:|;!", 1)) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        assert_same(checkpoints.restore_latest(state), (1, state))


def test_a_moved_checkpoint_is_read_from_any_path_but_one_with_a_backslash(directory, tmp_path):
    for name in ("[1]", "a*", "a?"):
        directory = directory.rename(tmp_path / name)
        with contextlib.closing(CheckpointReader(directory)) as reader:
            assert reader.read("['step']") == 2
    with pytest.raises(CheckpointError, match="its path has "):
        CheckpointReader(directory.rename(tmp_path / "a\\b"))


@pytest.mark.parametrize("then", ["save", "wait", "close"])
@pytest.mark.parametrize("damage", [delete_largest, empty_directory, change_a_checksum])
def test_a_checkpoint_that_cannot_be_read_back_is_reported_once(tmp_path, then, damage):
    checkpoints, directory = Checkpoints(tmp_path, 2), tmp_path / "1"
    checkpoints.save(1, {"w": jnp.arange(3)})
    checkpoints._manager.wait_until_finished()
    if damage is delete_largest:
        (directory / "state" / "manifest.ocdbt").unlink()
    else:
        damage(directory)
    act = {"save": lambda: checkpoints.save(2, {"w": jnp.arange(3)}), "wait": checkpoints.wait, "close": checkpoints.close}
    with pytest.raises(CheckpointError, match=r"1 was written but cannot be read back: .*") as error:
        act[then]()
    assert len(str(error.value).splitlines()) == 1
    checkpoints.close()


# --- Earlier versions ---


def as_of_an_earlier_version(directory):
    """Removes what a digest of an earlier version lacks: the step, and the upper words of checksums."""
    path = directory / "digest" / "metadata"
    digest = json.loads(path.read_text())
    del digest["step"]
    sums = [checksum % 2**32 for checksum in digest["checksums"]]
    crc = zlib.crc32(json.dumps([digest["leaves"], sums], sort_keys=True).encode())
    path.write_text(json.dumps(digest | {"checksums": sums, "crc": crc}))


def test_a_64_bit_leaf_of_an_earlier_version_is_restored_and_its_lower_half_verified(open_checkpoints, tmp_path, monkeypatch):
    with jax.enable_x64(True):
        state = {"w": jnp.array([1 / 3, 1e-300]), "n": jnp.array(-(2**40)), "b": jnp.arange(3, dtype=jnp.int32)}
        assert [leaf.dtype for leaf in state.values()] == [jnp.float64, jnp.int64, jnp.int32]
        checkpoints = open_checkpoints()
        checkpoints.save(1, state)
        checkpoints.wait()
        assert_same(checkpoints.restore_latest(state), (1, state))
        as_of_an_earlier_version(tmp_path / "checkpoints" / "1")
        assert_same(checkpoints.restore_latest(state), (1, state))
        with contextlib.closing(CheckpointReader(tmp_path / "checkpoints")) as reader:
            assert_same(reader.read("['w']"), state["w"])
        original = store.checksums
        monkeypatch.setattr(store, "checksums", lambda *args: [checksum ^ 1 for checksum in original(*args)])
        with pytest.raises(CheckpointError, match="has checksum"):
            checkpoints.restore_latest(state)


def test_the_checksums_of_earlier_versions_have_not_changed():
    assert checksums([jnp.arange(6.0).reshape(2, 3), jnp.array([True, False]), jnp.array([3, -1], jnp.int8)]) == [
        3416260608,
        1,
        768,
    ]
    with jax.enable_x64(True):
        assert [total % 2**32 for total in checksums([jnp.array([1 / 3, 1e-300])])] == [2655006560]


# --- Renamed directories ---


def test_a_renamed_checkpoint_is_refused_with_its_step_and_is_not_moved(open_checkpoints, directory, warnings):
    (directory / "2").rename(directory / "25")
    with pytest.raises(CheckpointError, match=r"25 was saved as 2: rename its directory to 2") as error:
        open_checkpoints().restore_latest(make_state())
    assert len(str(error.value).splitlines()) == 1
    with pytest.raises(CheckpointError, match=r"25 was saved as 2: ") as error:
        CheckpointReader(directory, field="from_step")
    assert error.value.field == "from_step"
    assert {path.name for path in directory.iterdir()} >= {"1", "25"}
    assert not warnings
    (directory / "25").rename(directory / "2")
    assert open_checkpoints().restore_latest(make_state())[0] == 2


# --- Single leaves ---


def test_a_single_leaf_is_read_bit_for_bit(directory):
    with contextlib.closing(CheckpointReader(directory)) as reader:
        assert reader.step == 2
        assert_same(reader.read("['b'][0]"), make_state(2)["b"][0])
    with contextlib.closing(CheckpointReader(directory, 1)) as reader:
        assert_same(reader.read("['a']"), make_state(1)["a"])


def test_a_leaf_with_a_wrong_checksum_is_refused(open_checkpoints, tmp_path, monkeypatch):
    original = store.checksums
    checkpoints = open_checkpoints()
    with monkeypatch.context() as patch:
        patch.setattr(store, "checksums", lambda *args: [checksum ^ 1 for checksum in original(*args)])
        checkpoints.save(1, make_state())
    checkpoints.wait()
    with (
        contextlib.closing(CheckpointReader(tmp_path / "checkpoints")) as reader,
        pytest.raises(CheckpointError, match="has checksum"),
    ):
        reader.read("['a']")


def test_a_leaf_with_another_shape_or_name_is_refused_with_the_checkpoint(directory):
    with contextlib.closing(CheckpointReader(directory, field="continue_from")) as reader:
        shapes = r"'a'\] has shape \[300, 40\] in it and \[300, 41\] in this run"
        with pytest.raises(CheckpointError, match=rf"checkpoint \S+/2 does not fit this run: .*{shapes}$") as error:
            reader.place({"['a']": jax.ShapeDtypeStruct((300, 41), jnp.float32)})
        assert error.value.field == "continue_from"
        with pytest.raises(CheckpointError, match=r"checkpoint \S+/2 has no \['c'\]$"):
            reader.read("['c']")


@pytest.mark.parametrize("field", ["crc", "checksums"])
def test_an_incomplete_digest_is_damage(directory, field):
    path = directory / "2" / "digest" / "metadata"
    path.write_text(json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name != field}))
    with pytest.raises(CheckpointError, match=r"is damaged \(its digest is incomplete\); name another `step`$"):
        CheckpointReader(directory)


def test_a_digest_that_is_nested_too_deeply_for_its_checksum_is_damage():
    digest = {"leaves": reduce(lambda nested, _: [nested], range(50_000), []), "checksums": [], "crc": 0, "step": 1}
    with pytest.raises(DamagedError, match=r"^its digest is incomplete$"):
        unseal(digest)


def test_a_reader_without_a_checkpoint_raises(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        CheckpointReader(tmp_path / "none")
