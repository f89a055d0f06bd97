"""Synthetic profiles, for tests of the code that reads profiles."""

from itertools import accumulate, chain
from typing import Any

import numpy as np

from jgraph.schedule import Costs, generate, simulate
from jgraph.schedule.action import KINDS

CATEGORIES = [
    *("forward", "dgrad", "wgrad", "recompute", "attention", "loss", "quantize", "optimizer"),
    *("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "transfer", "copies", "control", "other"),
]
NAMES = (
    "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NNT",
    "loop_add_fusion_3",
    "input_reduce_fusion",
    "flash_fwd_kernel",
    "copy.7",
)
_GIB = 1 << 30


def profile(ranks: int = 1, *, events: int = 400, microbatches: int = 16) -> dict[str, Any]:
    """Returns a profile in format 4. A profile of several ranks has a pipeline and its transfers.

    Args:
        ranks: Number of devices.
        events: Number of kernels in the timeline over all ranks, divided evenly among the streams.
        microbatches: Number of microbatches of the pipeline.
    """
    rng = np.random.default_rng(ranks)
    pipeline = _pipeline(ranks, microbatches) if ranks > 1 else None
    step = pipeline["measured"]["step_ms"] if pipeline else 31.7
    return {
        "format": 4,
        "title": f"gpt-124m, {microbatches} x 1024 tokens a step, {ranks} x NVIDIA H200",
        "about": {
            "device": "NVIDIA H200",
            "devices": ranks,
            "versions": {"python": "3.11.9", "jax": "0.11.2", "jaxlib": "0.11.2", "flax": "0.12.8"},
            "date": "2026-11-21T10:22:03",
            "flags": "--preset gpt-124m --train.num-microbatches 16 --parallel.pipeline 4 --profile.steps 3",
            "notes": ["Kernels of 3 steps; the median step is shown.", "Clocks were not locked."],
        },
        "captured": {
            "steps_ms": [step * share for share in (0.981, 0.975, 0.972)],
            "step_ms": step * 0.975,
            "launches": 1.0,
            "updates": 1.0,
            "records": 0.0,
            "launch_ms": 1.9,
            "update_ms": 0.1,
            "busy_ms": step * 0.962,
            "idle_ms": step * 0.013,
        },
        "uncaptured": {
            "steps_ms": [step * 1.002, step, step * 0.999],
            "step_ms": step,
            "ranks": [_rank(rank, ranks, step, rng) for rank in range(ranks)],
        },
        "groups": _groups(rng),
        "lines": [{"name": f"/home/me/src/models/gpt.py:{143 + i}", "count": 9, "ms": 2 * 0.8**i} for i in range(25)],
        "scopes": [{"name": "decoder/layer", "count": 90, "ms": step * 0.7}, {"name": "", "count": 9, "ms": step * 0.1}],
        "collectives": _collectives() if ranks > 1 else [],
        "graphs": [{"graph": "29", "module": "jit_step(0)", "launches": 1, "count": 105, "ms": 0.278, "named_ms": 0.241}],
        "roofline": {
            "name": "NVIDIA H200",
            "copy_bytes_per_second": 4.0e12,
            "product_flops_per_second": 7.0e14,
            "link_bytes_per_second": 3.0e11 if ranks > 1 else None,
            "source": "measured 2026-11-21",
        },
        "pipeline": pipeline,
        "memory": {
            "pools": {"parameters": 0.46 * _GIB, "main_grad": 0.46 * _GIB, "optimizer": 0.93 * _GIB, "residuals": 11.2 * _GIB}
            | ({"stash": 1.7 * _GIB} if ranks > 1 else {})
            | {"temporaries": 2.25 * _GIB},
            "predicted_peak": 15.9 * _GIB,
            "compiled_peak": 15.3 * _GIB,
            "measured_peak": 15.4 * _GIB,
            "usage": {
                "allocations": [0, 2, 3, 9],
                "scopes": {"loss": [0, 0, _GIB, 0], "forward": [_GIB, 3 * _GIB, 2 * _GIB, 0]},
            },
            "buffers": [
                {"count": 4, "nbytes": _GIB // 2, "shape": "bf16[8,4]", "op": "jit(step)/tanh at gpt.py:9", "scope": "forward"},
                {"count": 1, "nbytes": _GIB, "shape": "f32[8,4]", "op": "input_concatenate_fusion.3", "scope": ""},
            ],
        },
        "timeline": {"names": list(NAMES), "categories": CATEGORIES, "tracks": _tracks(ranks, events, step, rng)},
    }


def _rank(rank: int, ranks: int, step: float, rng: np.random.Generator) -> dict[str, Any]:
    alone = {"all-gather", "reduce-scatter", "all-reduce", "all-to-all", "transfer"}
    weights = np.array([9.1, 8.8, 8.2, 1, 2.4, 1.3, 0.7, 1.1, 0.6, 0.6, 0.5, 0.4, 0.9, 0.3, 0.1, 0.06]) * rng.uniform(
        0.9, 1.1, len(CATEGORIES)
    )
    own = {category: weight for category, weight in zip(CATEGORIES, weights, strict=True) if ranks > 1 or category not in alone}
    idle = step * (0.14 + 0.01 * rank if ranks > 1 else 0.02)
    scale = (step - idle) / sum(own.values())
    categories = {
        category: {
            "ms": float(weight * scale),
            "kernel_ms": float(weight * scale * (1.6 if category in alone else 1.01)),
            "kernels": int(40 * weight) + 1,
        }
        for category, weight in own.items()
    }
    return {
        "rank": rank,
        "busy_ms": step - idle,
        "idle_ms": idle,
        "attributed": 0.998 - 0.002 * rank,
        "categories": categories,
    }


def _groups(rng: np.random.Generator) -> list[dict[str, Any]]:
    groups = []
    for i in range(37):
        category, bound = CATEGORIES[i % len(CATEGORIES)], ("compute", "memory", "link")[i % 3]
        ms = float(3 * rng.uniform(0.6, 1) * 0.85**i)
        least = ms * float(rng.uniform(0.3, 0.95)) if i % 7 != 6 else None
        label = (
            f"matmul bf16[16384,{768 * (1 + i % 4)}] x [768,{768 * (1 + i)}]"
            if i % 3
            else f"fusion of add, multiply, rsqrt {i}"
        )
        source = f"models/gpt.py:{143 + i}" if i % 5 else ""
        group = {"label": label, "category": category, "source": source, "count": 12 * (1 + i % 4), "ms": ms}
        group |= {"flops": 1e11 * ms, "bytes": 1e9 * ms, "roofline_ms": least, "bound": bound if least else ""}
        groups.append(group | {"over_ms": ms - least if least else None})
    return sorted(groups, key=lambda group: group["over_ms"] or 0, reverse=True)


def _collectives() -> list[dict[str, Any]]:
    row = {"label": "all-gather bf16[1024]", "category": "all-gather", "count": 4, "ms": 1.0, "exposed_ms": 0.3}
    return [row | {"hidden_ms": 0.7, "hidden_by": [["matmul bf16[16,16]", 0.5], ["loop_add_fusion", 0.2]]}]


def _pipeline(ranks: int, microbatches: int) -> dict[str, Any]:
    schedule = generate("aligned", pp=ranks, microbatches=microbatches)
    costs = {"forward": 1.0, "dgrad": 1.1, "wgrad": 0.9}
    plan = simulate(schedule, Costs(**costs))
    run = simulate(schedule, Costs(*(np.linspace(cost, 1.08 * cost, ranks).tolist() for cost in costs.values())))
    actions = []
    for rank, order in enumerate(schedule.orders):
        times = [plan.starts[rank], plan.ends[rank], run.starts[rank], run.ends[rank]]
        for kind, chunk, microbatch, *at in zip(order.kinds, order.chunks, order.microbatches, *times, strict=True):
            spans = dict(zip(("planned_start_ms", "planned_end_ms", "start_ms", "end_ms"), map(float, at), strict=True))
            slow = {"slow_ms": spans["end_ms"] - spans["start_ms"] - costs[KINDS[kind]]}
            actions.append(
                {"rank": rank, "kind": KINDS[kind], "chunk": int(chunk), "microbatch": int(microbatch), **spans, **slow}
            )
    return {
        "schedule": "aligned",
        "ranks": ranks,
        "microbatches": microbatches,
        "chunks": 1,
        "costs_ms": costs,
        "planned": {"step_ms": plan.makespan, "bubble": plan.bubble},
        "measured": {"step_ms": run.makespan, "bubble": run.bubble},
        "actions": actions,
        "slow": sorted(range(len(actions)), key=lambda i: actions[i]["slow_ms"], reverse=True)[:10],
    }


def _tracks(ranks: int, events: int, step: float, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Returns two streams per rank: kernels with gaps between them, most of them much shorter than the mean."""
    tracks = []
    for i in range(2 * ranks):
        count = events * (i + 1) // (2 * ranks) - events * i // (2 * ranks)
        spans = rng.exponential(1, 2 * count) ** 2 + 0.02
        spans *= step / spans.sum()
        edges = list(chain([0.0], accumulate(spans.tolist())))
        stream = f"Stream #{14 + i % 2}({('Compute', 'Memcpy')[i % 2]})"
        track = {"rank": i // 2, "stream": stream, "start_ms": [round(edge, 6) for edge in edges[:-1:2]]}
        track["ms"] = [round(span, 6) for span in spans[::2].tolist()]
        categories = rng.choice(len(CATEGORIES) - 1, count) if i % 2 == 0 else rng.choice([8, 9, 12, 13], count)
        tracks.append(track | {"name": rng.integers(len(NAMES), size=count).tolist(), "category": categories.tolist()})
    return tracks
