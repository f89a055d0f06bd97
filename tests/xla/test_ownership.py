import jax
import jax.numpy as jnp
import pytest

from jgraph.errors import DonationError
from jgraph.xla import alias_map, aot, check_identity
from jgraph.xla.hlo import HloModule

STATE = {"b": jnp.ones(8), "count": jnp.zeros((), jnp.int32), "w": jnp.ones((8, 8))}


def compiled(step, state, *args):
    return jax.jit(step, donate_argnums=0, keep_unused=True).lower(state, *args).compile()


def update(state):
    return jax.tree.map(lambda x: x + 1, state)


def test_a_state_updated_in_place_passes():
    program = compiled(lambda state, x: (update(state), x.sum()), STATE, jnp.ones(3))
    assert alias_map(program) == {0: 0, 1: 1, 2: 2}
    assert check_identity(program, STATE) is None


def test_the_check_accepts_shapes_instead_of_arrays():
    program = compiled(lambda state: (update(state), 0), STATE)
    assert check_identity(program, jax.eval_shape(lambda: STATE)) is None


def test_a_single_array_is_a_valid_state():
    program = compiled(lambda w: w + 1, jnp.ones(8))
    assert alias_map(program) == {0: 0}
    assert check_identity(program, jnp.ones(8)) is None


def test_an_unchanged_leaf_keeps_its_buffer():
    program = compiled(lambda state: ({**state, "b": state["b"] * 2}, 0), STATE)
    assert check_identity(program, STATE) is None


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize(
    "change",
    [lambda w: w.astype(jnp.bfloat16), lambda w: w[:4]],
    ids=["dtype", "shape"],
)
def test_a_leaf_that_changes_its_shape_or_dtype_is_named(change):
    program = compiled(lambda state: ({**update(state), "w": change(state["w"])}, 0), STATE)
    with pytest.raises(DonationError, match=r"1 of 3 leaves .*\['w'\]; check that shape, dtype and layout") as error:
        check_identity(program, STATE)
    assert error.value.leaves == ("['w']",)


def test_swapped_leaves_are_reported_with_the_buffers_that_they_reuse():
    state = (jnp.ones(8), jnp.ones(4))
    program = compiled(lambda s: ((s[1] + 1, s[0] + 1), 0), state)
    assert alias_map(program) == {0: 1, 1: 0}
    with pytest.raises(
        DonationError, match=r"\[0\] takes the buffer of \[1\], \[1\] takes the buffer of \[0\]; check"
    ) as error:
        check_identity(program, state)
    assert error.value.leaves == ("[0]", "[1]")


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_the_buffer_of_a_mismatched_leaf_goes_to_the_next_leaf_of_its_shape():
    state = {"m": jnp.ones(8), "v": jnp.ones(8)}
    program = compiled(lambda s: ({"m": s["m"].astype(jnp.bfloat16), "v": s["v"] + 1}, 0), state)
    with pytest.raises(
        DonationError, match=r"not updated in place: \['m'\];.*; .*\['v'\] takes the buffer of \['m'\]"
    ) as error:
        check_identity(program, state)
    assert error.value.leaves == ("['m']", "['v']")


def test_a_buffer_from_another_argument_is_reported_by_its_leaf_index():
    program = (
        jax.jit(lambda w, x: (x + 1, w.sum()), donate_argnums=1, keep_unused=True).lower(jnp.ones(8), jnp.ones(8)).compile()
    )
    with pytest.raises(DonationError, match="the state takes the buffer of argument leaf 1"):
        check_identity(program, jnp.ones(8))


def test_a_state_that_is_not_donated_is_refused():
    program = jax.jit(lambda state: (update(state), 0), keep_unused=True).lower(STATE).compile()
    assert alias_map(program) == {}
    with pytest.raises(DonationError, match=r"3 of 3 leaves .*donate_argnums=0") as error:
        check_identity(program, STATE)
    assert error.value.leaves == ("['b']", "['count']", "['w']")


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        ("", {}),
        ("input_output_alias={ {}: (0, {}, may-alias) }, ", {0: 0}),
        ("input_output_alias={ {0}: (3, {}, must-alias), {12}: (1, {}, may-alias) }, ", {0: 3, 12: 1}),
        ("input_output_alias={ {0}: (0, {2}, may-alias), {1}: (0, {0}) }, ", {0: 2, 1: 0}),
    ],
    ids=["none", "single output", "several", "arguments in one tuple"],
)
def test_aliases_are_parsed_from_the_module_header(entry, found):
    # The rest of the header also has braces, which are not aliases.
    layout = "entry_computation_layout={(f32[8]{0})->f32[8]{0}}"
    header = f"HloModule jit_step, is_scheduled=true, {entry}{layout}, other={{ {{7}}: (7, {{}}) }}"
    assert HloModule(header).aliases == found


@pytest.mark.target
def test_aliases_are_parsed_from_a_gpu_program(h200):
    program, _ = aot.compile_for(jax.jit(lambda s: (update(s), s["w"].sum()), donate_argnums=0, keep_unused=True), STATE)
    assert check_identity(program, STATE) is None


def test_tokens_do_not_shift_argument_and_output_indices():
    layout = "entry_computation_layout={(token[], f32[3]{0}, f32[4]{0})->(token[], f32[3]{0}, f32[4]{0})}"
    header = f"HloModule jit_step, input_output_alias={{ {{1}}: (1, {{}}, may-alias), {{2}}: (2, {{}}, may-alias) }}, {layout}"
    assert HloModule(header).aliases == {0: 0, 1: 1}
    only_in = header.replace("->(token[], ", "->(")
    assert HloModule(only_in).aliases == {1: 0, 2: 1}
