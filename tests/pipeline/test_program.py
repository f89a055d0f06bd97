"""The compiled program of an aligned schedule: its branches, matmuls and pools."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgraph import split_backward
from jgraph.pipeline._runtime import RankRuntime
from jgraph.schedule import generate, phases, tabulate
from jgraph.schedule.action import WGRAD
from tests.pipeline import model

P, M = 4, 12  # enough microbatches to repeat all three kinds of rounds
SCHEDULE = generate("aligned", pp=P, microbatches=M)
COLUMNS = tabulate(SCHEDULE.newest_first(), writing="makers")


class Hlo:
    """The operations of a compiled program, by computation."""

    def __init__(self, text: str):
        self.bodies: dict[str, list[str]] = {}
        for block in re.split(r"\n(?=\S.*\{\n)", text):
            header, _, body = block.partition("{\n")
            name = "ENTRY" if header.startswith("ENTRY") else header.split()[0] if header.split() else ""
            # Loops with a trip count known only at run time are renamed to act_where.
            lines = (
                line if "known_trip_count" in line else line.replace(" while(", " act_where(") for line in body.splitlines()
            )
            self.bodies[name] = list(lines)

    def count(self, operation: str, name: str = "ENTRY") -> int:
        """Counts an operation in a computation and in its callees, once per call."""
        total = 0
        for line in self.bodies[name]:
            total += f" {operation}(" in line
            called = re.findall(r"(?:calls|body|condition|to_apply|true_computation|false_computation)=(%[\w.\-]+)", line)
            for group in re.findall(r"branch_computations=\{([^}]*)\}", line):
                called += re.findall(r"%[\w.\-]+", group)
            total += sum(self.count(operation, each) for each in called)
        return total

    def loops(self) -> list[tuple[int, str]]:
        """Returns (trip count, body) of the loops over rounds, in execution order."""
        lines = [line for line in self.bodies["ENTRY"] if " while(" in line]
        found = [re.search(r'body=(%[\w.\-]+).*"known_trip_count":\{"n":"(\d+)"\}', line) for line in lines]
        return [(int(match[2]), match[1]) for match in found if match]


def hlo(function, *args) -> Hlo:
    return Hlo(jax.jit(function).lower(*args).compile().as_text() or "")


@cache
def program() -> Hlo:
    pipe = model.pipeline(SCHEDULE, P, runtime="aligned")
    return hlo(pipe.loss_and_grads, model.placed(pipe, *model.params(P)), model.batch(M))


def steady_body() -> str:
    """Returns the loop over rounds with a forward, a dgrad and a wgrad on all ranks."""
    (full,) = [p for p in phases(COLUMNS.table) if p.kinds == (("forward",), ("dgrad",), ("wgrad",))]
    (body,) = [body for rounds, body in program().loops() if rounds == full.rounds]
    assert full.rounds > 3
    return body


def count_branches() -> tuple[int, int]:
    """Counts the actions that only some ranks do, and the ticks with embedding or head in only some rounds."""
    actions = count = 0
    for phase in phases(COLUMNS.table):
        for j in range(len(phase.kinds)):
            ticks = phase.first_tick + j + len(phase.kinds) * np.arange(phase.rounds)
            wgrads = COLUMNS.table.kind[ticks] == WGRAD
            actions += len(phase.kinds[j]) * bool(wgrads.any() and not wgrads.all())
            # Embedding and head need a branch if only some rounds of a phase have them.
            for numbers in (COLUMNS.enter, COLUMNS.leave, COLUMNS.back):
                has = numbers[ticks] >= 0
                count += bool(has.any() and not has.all())
    return actions, count


@pytest.mark.long
def test_every_phase_of_several_rounds_is_one_loop():
    rounds = [phase.rounds for phase in phases(COLUMNS.table) if phase.rounds > 1]
    assert sorted(n for n, _ in program().loops()) == sorted(rounds)


def test_a_steady_round_has_no_branches():
    assert program().count("conditional", steady_body()) == 0
    assert program().count("act_where", steady_body()) == 0


def test_only_actions_that_differ_between_ranks_have_a_conditional_loop():
    actions, branches = count_branches()
    # Forwards and wgrads inside and outside a loop; dgrads and wgrads.
    assert (actions, branches) == (6, 0)
    assert program().count("act_where") == actions
    assert program().count("conditional") == branches


def test_a_steady_round_has_the_matmuls_of_one_forward_dgrad_wgrad_and_head():
    outer, layers = model.params(P)
    x = jnp.zeros((model.B, model.T, model.D))
    inputs = jax.tree.map(lambda leaf: leaf[0], model.batch(M))
    split = split_backward(model.layer)
    _, residuals = split.forward(layers[0], x)
    _, _, stash = split.dgrad(layers[0], residuals, x)
    parts = {
        "forward": hlo(split.forward, layers[0], x),
        "dgrad": hlo(split.dgrad, layers[0], residuals, x),
        "wgrad": hlo(split.wgrad, layers[0], residuals, stash),
        "head": hlo(jax.value_and_grad(model.head, (0, 1)), outer, x, inputs),
    }
    matmuls = {name: part.count("dot") for name, part in parts.items()}
    assert matmuls == {"forward": 2, "dgrad": 2, "wgrad": 2, "head": 3}
    assert program().count("dot", steady_body()) == sum(matmuls.values())


def initial_pools(monkeypatch, pipe) -> dict:
    """Returns the shapes of the pools of a rank at the start of the program."""
    seen = []
    start = RankRuntime.start
    monkeypatch.setattr(RankRuntime, "start", lambda runtime: seen.append(start(runtime)) or seen[-1])
    stacked = model.placed(pipe, *model.params(pipe.assignment.num_layers))
    jax.eval_shape(pipe.loss_and_grads, stacked, model.batch(pipe.schedule.num_microbatches))
    (state,) = seen
    return state.pools


def nbytes(pool) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in pool.leaves)


@pytest.mark.parametrize(
    ("name", "C", "runtime"),
    [
        ("aligned", 1, "aligned"),
        ("aligned", 2, "aligned"),
        ("aligned", 2, "general"),
        ("zb-v", 2, "general"),
        ("gpipe", 1, "general"),
    ],
)
def test_pools_have_exactly_the_bytes_of_their_slots(monkeypatch, name, C, runtime):
    pipe = model.pipeline(generate(name, pp=P, microbatches=M, chunks=C), P * C, runtime=runtime)
    pools = initial_pools(monkeypatch, pipe)
    slots = tabulate(pipe.schedule, writing="makers" if runtime == "aligned" else "all").slots
    x = jax.ShapeDtypeStruct((model.B, model.T, model.D), jnp.float32)
    one = split_backward(model.layer).spec(model.params(1)[1][0], x).nbytes()
    one |= dict.fromkeys(("activation", "gradient", "loss"), 4 * x.size)
    assert {pool: nbytes(held) for pool, held in pools.items()} == {pool: n * one[pool] for pool, n in slots.items()}
    assert [pool for pool, n in slots.items() if n == 0] == (["stash"] if name == "gpipe" else [])


def test_a_recomputed_layer_saves_only_its_input(monkeypatch):
    pools = initial_pools(monkeypatch, model.pipeline(SCHEDULE, P, remat="layer"))
    held = [leaf.shape[1:] for pool in ("forward_dgrad", "forward_wgrad") for leaf in pools[pool].leaves]
    assert held == [(model.B, model.T, model.D)]
