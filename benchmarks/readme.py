"""Writes the tables of README.md, of two pages of notes/ and of benchmarks/results/*.md, and pictures, from the results."""

import importlib
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks import pictures, runner
from benchmarks.compare import ResultsError, distinct, read
from benchmarks.others import table as others
from benchmarks.peers.te_variant import is_te
from benchmarks.rows import Row, fastest, ratio, row_name
from benchmarks.runner import SOAK_HEADS, benchmark_of, find_benchmarks, soak_rows, soaks_page
from benchmarks.tables import (
    HEADS,
    comparison_cells,
    count_peers,
    group_by_placement,
    markdown,
    ratio_text,
    short,
    variant_text,
)
from jgraph.schedule import Costs, Simulation, generate, simulate

ROOT = Path(__file__).parents[1]
NOTES = ROOT / "notes"
README, PAGE, OTHERS = ROOT / "README.md", NOTES / "benchmarks.md", NOTES / "guide/other-programs.md"
PLAN = NOTES / "guide/plan.md"
SPEED, ALL_SPEEDS = "assets/speed.svg", "assets/speeds.svg"
MULTI_GPU = ("pipeline", "fsdp", "tensor_context", "callables")  # benchmarks on several GPUs, in the order of the page
WITH_FP8 = ("fp8", "fsdp", "moe", "pipeline")  # benchmarks with FP8 results
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"

# Rows of README's table: text, results file, work, and the variants of jgraph to choose the fastest from (all if empty).
GAINS = (
    ("GPT, 12 layers of 256, 2 x 128 tokens: launches limit the step", "single_gpu", "launch-bound", ()),
    ("GPT 124M, bf16", "single_gpu", "gpt-124m", ()),
    ("GPT 1.3B, bf16", "single_gpu_1b3", "gpt-1b3", ()),
    ("GPT 124M, FP8", "fp8", "gpt-124m", ("fp8=delayed", "fp8=current")),
    ("GPT 1.3B, FP8", "fp8_1b3", "gpt-1b3", ("fp8=delayed", "fp8=current")),
    ("Llama 3 8B, FP8, state sharded over 2 GPUs", "fsdp_fp8_llama", "llama3-8b", ("fp8=delayed graph=full grads=float32",)),
    ("Qwen3 0.6B, LoRA, bf16", "finetune", "qwen3-0.6b, 8x2048 tokens", ("",)),
    ("GPT with 8 experts, 2 per token, bf16", "moe", "gpt-moe", ()),
    ("Llama of 1.3B, text generation, per token", "decode", "llama-1b3", ("",)),
    ("Small MLPs, pipeline of 2 GPUs", "pipeline2", "mlp-launch-bound", ()),
    ("Large MLPs, pipeline of 2 GPUs", "pipeline2", "mlp-large", ()),
    ("12 small GPT blocks as graphed callables, called one by one", "callables1", "blocks", ("one by one",)),
)

# Names of peers, by the system of a row. Transformer Engine is the part of PyTorch's rows that uses it.
PEERS = {"jax": "jax.jit + optax", "torch": "PyTorch", "te": "Transformer Engine"}
# Peers that compute in the same precision as jgraph, for rows where not all do.
SAME_PRECISION = {
    "GPT 124M, FP8": ("te",),
    "GPT 1.3B, FP8": ("te",),
    "Llama 3 8B, FP8, state sharded over 2 GPUs": ("torch", "te"),
}
# Rows of README's picture. The picture of the page of benchmarks has all.
PICTURED = (
    "GPT, 12 layers of 256, 2 x 128 tokens: launches limit the step",
    "GPT 1.3B, bf16",
    "GPT 1.3B, FP8",
    "Llama 3 8B, FP8, state sharded over 2 GPUs",
    "Large MLPs, pipeline of 2 GPUs",
)
TEXTS = tuple(text for text, *_ in GAINS)
assert {*SAME_PRECISION, *PICTURED} <= {*TEXTS}, "each row of a picture is a row of the table"


def write_readme(check: bool) -> int:
    """Writes or checks the pages with generated tables, and the pictures. Returns 1 if a checked page is outdated."""
    pages = {README: _with_tables(README, gains_table()), PAGE: _with_tables(PAGE, page_tables())}
    pages[OTHERS] = _with_tables(OTHERS, others.table())
    pages[PLAN] = _with_tables(PLAN, "\n".join(plans_table()))
    pages |= {page: new for page in sorted(runner.RESULTS.glob("*.md")) if (new := results_page(page))}
    drawn = {SPEED: gains_picture(PICTURED), ALL_SPEEDS: gains_picture(TEXTS), **timelines()}
    pages |= {NOTES / path: picture for path, picture in drawn.items()}
    outdated = [page for page, new in pages.items() if not page.exists() or page.read_text() != new]
    if check and outdated:
        names = ", ".join(page.name for page in outdated)
        print(f"{names}: differs from the results; run python -m benchmarks readme", file=sys.stderr)
        return 1
    for page in outdated:
        page.write_text(pages[page])
    return 0


def _with_tables(page: Path, tables: str) -> str:
    """Returns the text of a page with `tables` between its markers."""
    head, begin, rest = page.read_text().partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ResultsError(f"{page} has no place for the tables; add the lines {BEGIN} and {END}")
    return f"{head}{BEGIN}\n{tables}\n{END}{tail}"


def gains_table() -> str:
    """Returns the table of README: for each row of `GAINS`, the fastest time of each peer divided by the time of jgraph."""
    lines = []
    for text, ours, peers in gains():
        cells = [f"{_ratio(peer, ours)} x ({short(peer['ms'])} ms)" if peer else "not measured" for peer in peers.values()]
        lines += [[text, f"{short(ours['ms'])} ms", *cells]]
    heads = ["training step or work", "jgraph", "`jax.jit` + optax", *(PEERS[kind] for kind in ("torch", "te"))]
    return "\n".join(markdown(heads, lines))


def gains_picture(texts: Sequence[str]) -> str:
    """Returns a picture of rows of `GAINS`: the times of jgraph, and of peers in the same precision, as bars."""
    groups = []
    for text, ours, peers in gains():
        timed = [(PEERS[kind], row) for kind in SAME_PRECISION.get(text, PEERS) if (row := peers[kind])]
        bars = [pictures.Bar(name, short(row["ms"]), _ratio(row, ours)) for name, row in timed]
        if text in texts:
            groups += [(text, [pictures.Bar("jgraph", short(ours["ms"]), "1"), *bars])]
    return pictures.bars("Times on NVIDIA H200 GPUs: shorter bars are faster", groups)


def gains() -> Iterable[tuple[str, Row, dict[str, Row | None]]]:
    """Yields the text, the fastest row of jgraph and the fastest of each peer, for rows of `GAINS` with a time of jgraph."""
    for text, file, work, variants in GAINS:
        rows = read(runner.RESULTS / f"{file}.json")[work]["rows"]
        ours = fastest([row for row in rows if not variants or row["variant"] in variants], "jgraph")
        groups: dict[str, list[Row]] = {kind: [] for kind in PEERS}
        for row in rows:
            if row.get("variant", "").endswith("no rotary"):  # computes less than the others
                continue
            is_engine = row["system"] == "torch" and is_te(row["variant"])
            if row["system"] in groups:
                groups["te" if is_engine else row["system"]].append(row)
        if ours:
            yield text, ours, {kind: fastest(own, "jax" if kind == "jax" else "torch") for kind, own in groups.items()}


def _ratio(peer: Row, ours: Row) -> str:
    return ratio(peer, ours, digits=2).partition(" ")[0]


def timelines() -> dict[str, str]:
    """Returns the pictures of pipelines by their path in notes/: two schedules, and a planned and a measured step."""
    drawn = {}
    for name, chunks in (("zb-h1", 1), ("aligned", 2)):
        found = generate(name, pp=4, microbatches=8, chunks=chunks)
        run = simulate(found, Costs().per_chunk(chunks), execution="lockstep" if name == "aligned" else "dataflow")
        drawn[f"concepts/{name}.svg"] = pictures.timeline(name, run, "units of time")
    (result,) = read(runner.RESULTS / "pipeline_trace.json").values()
    (row,) = result["rows"]
    ordered = generate(row["schedule"], pp=result["ranks"], microbatches=result["microbatches"]).newest_first()
    planned = simulate(ordered, Costs(**row["categories"]), execution="lockstep")
    measured = Simulation(ordered, *(tuple(map(np.array, row[key])) for key in ("starts_ms", "ends_ms")), latency=0.0)
    for name, run in (("planned", planned), ("measured", measured)):
        drawn[f"develop/pipeline-{name}.svg"] = pictures.timeline(f"{name} step", run, "ms")
    return drawn


def results_page(page: Path) -> str:
    """Returns the text of a results page. Empty if its benchmark no longer exists."""
    works = read(page.with_suffix(".json"))
    if page.stem == "soaks":
        return soaks_page(works)
    name = benchmark_of(page.stem, scripts := find_benchmarks())
    return importlib.import_module(f"benchmarks.{name}").BENCHMARK.draw(works) if name in scripts else ""


def page_tables() -> str:
    """Returns the tables of the benchmarks page, each with a heading, a sentence, versions, dates and links to its results."""
    data = {file.stem: read(file) for file in sorted(runner.RESULTS.glob("*.json"))}
    blocks = max((name for name in data if "blocks" in data[name]), key=lambda name: distinct(data[name].values(), "date"))

    def present(*names: str) -> list[str]:
        return [name for name in names if name in data]

    def files_of(*kinds: str) -> list[str]:
        return [name for name in data if benchmark_of(name, kinds) in kinds]

    def works(names: list[str]) -> Iterator[tuple[str, Row]]:
        return (item for name in names for item in data[name].items())

    one, sharded_moe = present("single_gpu", "single_gpu_1b3"), present("fsdp_experts")
    several = [name for kind in MULTI_GPU for name in data if name.rstrip("0123456789") == kind]
    several = [name for name in several if any(result["ranks"] > 1 for result in data[name].values())]
    several += [name for name in data if name.endswith("_earlier")]
    fp8 = [name for name in files_of(*WITH_FP8) if "fp8" in name]
    moe = [name for name in files_of("moe") if name not in fp8]
    grouped, finetune = files_of("grouped"), files_of("finetune")
    experts = [comparison_cells(f"{work}, {batch_text(one)}", one, [one["rows"]]) for work, one in works(moe)]
    experts += [cells for item in works(sharded_moe) for cells in expert_rows(*item)]
    tables = [
        (
            "Training step on one GPU",
            "Each cell is the median time of a training step in milliseconds.",
            one,
            one_gpu_table(list(works(one))),
        ),
        (
            "Graphed callables",
            "Twelve launch-bound GPT blocks run forward and backward. Host time is the time of one of the 24 calls until the "
            "work is dispatched to the GPU. The ratios are relative to `torch graphed callables`.",
            [blocks],
            callables_table(data[blocks]["blocks"]["rows"]),
        ),
        (
            "Several GPUs",
            "Times are medians in milliseconds: a whole training step for `fsdp` and `tensor_context`, loss and gradients for "
            "`pipeline` and `callables`.",
            several,
            multi_gpu_table(data),
        ),
        (
            "FP8",
            "Times are medians in milliseconds: a training step, or loss and gradients for pipelines. Each column shows its "
            "fastest variant. `options` is delayed scaling with fast accumulation in dgrad and wgrad, the head in FP8 and a "
            "first moment in bfloat16, which are off by default.",
            fp8,
            fp8_table(("pipeline, " * ("pipeline" in name) + work, one) for name in fp8 for work, one in data[name].items()),
        ),
        (
            "Text generation",
            "Each time is the median in milliseconds per token, greedy, for one prompt.",
            present("decode"),
            markdown(HEADS, [comparison_cells(work, one, [one["rows"]]) for work, one in works(present("decode"))]),
        ),
        (
            "Mixtures of experts",
            "Times are medians in milliseconds: a training step, or forward and backward of the layers for `-layers`.",
            [*moe, *sharded_moe],
            markdown(HEADS, experts),
        ),
        (
            "Grouped matmuls in bfloat16",
            "Each cell is the rate of jgraph in TFLOP/s, and the time of PyTorch over the time of jgraph.",
            grouped,
            grouped_table(works(grouped)),
        ),
        (
            "Fine-tuning with LoRA",
            "Times are medians in milliseconds of a step that trains the adapters. PyTorch runs PEFT in bfloat16.",
            finetune,
            markdown(HEADS, [cells for item in works(finetune) for cells in finetune_rows(*item)]),
        ),
        (
            "Plans",
            "Peak memory and time of a step as `python -m jgraph.plan` predicts them, beside measured steps. A row is above "
            "the margin if it needs more than the planned peak and the margin of the plan.",
            present("plans"),
            plans_table(),
        ),
        (
            "Soak runs",
            "Each run repeats one step many times with collectives inside CUDA graphs, and checks for hangs, growth of memory "
            "and changed losses.",
            present("soaks"),
            markdown(SOAK_HEADS, soak_rows(data.get("soaks", {}))),
        ),
    ]
    parts: list[str] = []
    for title, sentence, used, table in (table for table in tables if table[2]):
        results = [result for name in used for result in data[name].values()]
        jax, torch, dates = (distinct(results, key) for key in ("jax", "torch", "date"))
        links = ", ".join(f"[{name}](../benchmarks/results/{name}.md)" for name in used)
        versions = f"jax {jax}" + f", PyTorch {torch}" * bool(torch)
        parts += [f"## {title}", "", sentence, "", f"{versions}, {dates}: {links}.", "", *table, ""]
    return "\n".join(parts[:-1])


def one_gpu_table(works: Sequence[tuple[str, Row]]) -> list[str]:
    """Returns a table with one row per preset and one column per variant. The jgraph column has the fastest kernels."""
    heads = {
        ("jgraph", ""): "jgraph",
        ("jgraph", "graph=off"): "jgraph, graphs off",
        ("jax", "same"): "jax.jit + optax, same model",
        ("jax", "same nnx"): "same model, nnx.State",
        ("jax", "same flatten"): "same model, optax.flatten",
        ("jax", "stock"): "jax.jit + optax, stock parts",
        ("jax", "stock flatten"): "stock parts, optax.flatten",
        ("torch", "compile + CUDA graph"): "torch.compile + CUDA graph",
        ("torch", "compile"): "torch.compile",
        ("torch", "eager"): "torch eager",
        ("torch", "compile max-autotune + CUDA graph"): "torch max-autotune + CUDA graph",
    }
    timings, lines = [], []
    for _, result in works:
        ours = fastest([row for row in result["rows"] if is_default_variant(row)], "jgraph")
        times_by = {(row["system"], row["variant"]): row["ms"] for row in result["rows"] if "ms" in row}
        timings.append((ours, times_by | ({("jgraph", ""): ours["ms"]} if ours else {})))
    shown = [variant for variant in heads if any(variant in times_by for _, times_by in timings)]
    for (preset, result), (ours, ms) in zip(works, timings, strict=True):
        rows, config, best = result["rows"], result["config"], min((ms[v] for v in shown if v in ms), default=None)
        times = [("**{}**" if ms[v] == best else "{}").format(short(ms[v])) if v in ms else "not run" for v in shown]
        model, peer = config["model"], fastest(rows, "torch")
        shape = f"{model['num_layers']} layers of {model['d_model']}, {config['batch_size']}x{config['seq_len']} tokens"
        sizes = [row.get("peak_bytes") if row else None for row in (ours, peer)]
        peaks = ", ".join(f"{size / 1e9:.{1 if size >= 1e9 else 2}f}" if size else "not recorded" for size in sizes)
        lines += [
            [f"{preset}, {shape}", *times, f"{ratio_text(peer, ours)}, {count_peers(rows)}" if peer and ours else "", peaks]
        ]
    return markdown(
        ["preset", *(heads[v] for v in shown), "fastest PyTorch / jgraph", "peak memory of jgraph, PyTorch, GB"], lines
    )


def plans_table() -> list[str]:
    """Returns the table of plans beside measured steps; empty without their results."""
    from benchmarks import plans  # imported here, because it imports jax

    file = runner.RESULTS / "plans.json"
    return plans.table(read(file)) if file.exists() else []


def grouped_table(works: Iterable[tuple[str, Row]]) -> list[str]:
    """Returns a table of grouped matmuls: the rate of jgraph, and the time of PyTorch over the time of jgraph."""
    legs = {"forward": "forward", "dgrad": "dgrad", "wgrad": "wgrad", "onto_float32": "wgrad added to float32"}
    lines = []
    for work, result in works:
        # Rows of Transformer Engine with an FP8 recipe have another precision.
        peer, ours = (
            fastest([row for row in result["rows"] if precision(row) == "bf16"], name) for name in ("torch", "jgraph")
        )
        flops = 2 * math.prod(result["size"]["shape"][:3])
        cells = [f"{flops / ours[f'{leg}_ms'] / 1e9:.0f}, {ratio(peer, ours, f'{leg}_ms', digits=2)}" for leg in legs if ours]
        lines += [[work, result["device"] or "not recorded", *cells]]
    heads = [f"{name}: TFLOP/s, ratio" for name in legs.values()]
    return markdown(["tokens x input width x output width, experts, routing", "device", *heads], lines)


def expert_rows(work: str, result: Row) -> Iterable[list[str]]:
    """Yields two comparisons of a mixture of experts on several GPUs with PyTorch's expert parallelism."""
    for kind, is_parallel in (("expert parallel", True), ("experts gathered", False)):
        rows = [row for row in result["rows"] if row["system"] == "torch" or ("layout=ep" in row["variant"]) == is_parallel]
        yield comparison_cells(f"{work}, {batch_text(result)}, {kind}", result, [rows])


def finetune_rows(work: str, result: Row) -> Iterable[list[str]]:
    """Yields the comparisons of a fine-tuning step with PEFT: jgraph in bfloat16, then jgraph in FP8 if it was timed."""
    for text, is_fp8 in (("", False), (", jgraph in FP8", True)):
        rows = [row for row in result["rows"] if row["system"] == "torch" or (precision(row) != "bf16") == is_fp8]
        if any(row["system"] == "jgraph" for row in rows):
            yield comparison_cells(work + text, result, [rows])


def is_default_variant(row: Row) -> bool:
    """Reports whether a jgraph row uses the preset. An explicit kernel choice counts, because the preset picks the fastest."""
    options = row["variant"].split()
    return row["system"] == "jgraph" and all(option.startswith(("attention=", "norm=")) for option in options)


def callables_table(rows: list[Row]) -> list[str]:
    """Returns a table of graphed callables: host time per call and time per iteration, with ratios to PyTorch."""
    peer = next((row for row in rows if (row["system"], row["variant"]) == ("torch", "graphed callables")), {})
    lines = []
    for row in rows:
        cells = [row_name(row)]
        for key, digits in (("host_us", 1), ("ms", 2)):
            cells += [f"{row[key]:.{digits}f}" if key in row else row.get("failed", "did not run")]
            cells += ["" if row is peer else ratio(row, peer, key, digits=2)]
        lines += [cells]
    return markdown(["variant", "host time per call, us", "ratio", "time per iteration, ms", "ratio"], lines)


def multi_gpu_table(data: dict[str, dict[str, Row]]) -> list[str]:
    """Returns a table of works by number of GPUs. The ratio comes from rounds, or else is the range of all stored runs."""
    lines: list[tuple[int, list[str]]] = []
    for name, works in data.items():
        if (kind := name.rstrip("0123456789")) in MULTI_GPU:
            for work, result in ((work, result) for work, result in works.items() if result["ranks"] > 1):
                title = f"{kind}, {work}" if batch_text(result) in work else f"{kind}, {work}, {batch_text(result)}"
                if kind == "fsdp":
                    groups = group_by_placement(result["rows"])
                    titled = [(f"{title}, parameters {placement}", [rows]) for placement, rows in groups.items()]
                elif "config" in result:
                    titled = [(title, [result["rows"]])]
                else:
                    titled = [(title, stored_runs(data, name, work))]
                lines += [(result["ranks"], comparison_cells(title, result, runs)) for title, runs in titled]
    return markdown(HEADS, [cells for _, cells in sorted(lines, key=lambda one: one[0])])


def fp8_table(works: Iterable[tuple[str, Row]]) -> list[str]:
    """Returns a table of works by placement: the fastest step per precision, and the ratios of the fastest rows."""
    heads = ["work", "devices", "jgraph bf16", "jgraph FP8, current", "jgraph FP8, delayed", "jgraph FP8, options"]
    heads += ["torch bf16", "torchao float8", "Transformer Engine FP8"]
    lines = []
    for work, result in works:
        groups = group_by_placement(result["rows"])
        for kind, rows in groups.items():
            kinds: dict[tuple[str, str], list[Row]] = {}
            for row in rows:
                kinds.setdefault((row["system"], precision(row)), []).append(row)
            shown = [
                ("jgraph", "bf16"),
                ("jgraph", "current"),
                ("jgraph", "delayed"),
                ("jgraph", "options"),
                *(("torch", kind) for kind in ("bf16", "float8", "te")),
            ]
            best = {own: fastest(kinds.get(own, []), own[0]) for own in shown}
            ours = fastest([row for own in shown[1:3] for row in kinds.get(own, [])], "jgraph")
            peer, plain = fastest(rows, "torch"), best["jgraph", "bf16"]
            title = f"{work}, {batch_text(result)}" + f", parameters {kind}" * (len(groups) > 1)
            times = [short(row["ms"]) if row else "did not run" * (own in kinds) for own, row in best.items()]
            to_torch = count_peers(rows)
            if ours and peer:
                to_torch = f"{ratio_text(peer, ours)} ({variant_text(peer)}; {to_torch})"
            to_bf16 = ratio_text(plain, ours) if ours and plain else ""
            lines += [[title, result["device"] or "not recorded", *times, to_torch, to_bf16]]
    return markdown([*heads, "fastest PyTorch / jgraph FP8", "jgraph bf16 / FP8"], lines)


def precision(row: Row) -> str:
    """Returns the precision in the variant of a row: te (in FP8), current, delayed, options, float8 or bf16.

    `options` is FP8 with fast accumulation in dgrad and wgrad, and other options that are off by default.
    """
    settings = set(row["variant"].replace("=", " ").replace(":", " ").split())
    if "fast" in settings:
        return "options"
    if {"te", "bf16"} <= settings:
        return "bf16"
    return next((name for name in ("te", "current", "delayed", "float8") if name in settings), "bf16")


def batch_text(result: Row) -> str:
    """Returns the batch size of a result: "d WIDTH, N tokens" or "BATCHxLENGTH tokens"."""
    size = result.get("config") or result["size"]
    if "tokens" in size:
        return f"d {size['d_model']}, {size['tokens']} tokens"
    batch, length = (size["batch_size"], size["seq_len"]) if "config" in result else (size["batch"], size["length"])
    return f"{batch}x{length} tokens"


def stored_runs(data: dict[str, dict[str, Row]], name: str, work: str) -> list[list[Row]]:
    """Returns the rows of all stored runs of a work.

    The newest run comes first, then earlier runs, then the PyTorch rows of other benchmarks with the same size and ranks.
    """
    own, before = data[name][work], f"{name}_earlier"
    runs = [own["rows"], *(result["rows"] for other, result in data.get(before, {}).items() if other == work)]
    others = (result for file, works in data.items() if file not in (name, before) for result in works.values())
    same = (one for one in others if (one.get("size"), one.get("ranks")) == (own["size"], own["ranks"]))
    return [*runs, *([row for row in one["rows"] if row["system"] == "torch"] for one in same)]
