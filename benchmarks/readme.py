"""Writes the tables of README.md, of notes/benchmarks.md and of benchmarks/results/*.md from the stored results."""

import importlib
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import runner
from benchmarks.compare import ResultsError, distinct, read
from benchmarks.rows import Row, fastest, named, ratio
from benchmarks.runner import SOAKS, benchmark_of, draw_soaks, find_benchmarks, soaks
from benchmarks.tables import HEADS, group_by_placement, variant_text, markdown, short, ratio_text, count_peers, comparison_cells

ROOT = Path(__file__).parents[1]
README, PAGE = ROOT / "README.md", ROOT / "notes/benchmarks.md"
SEVERAL = ("pipeline", "fsdp", "callables")  # benchmarks on several GPUs, in the order of the page
IN_FP8 = ("fp8", "fsdp", "moe", "pipeline")  # benchmarks with results in FP8
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"

# Rows of README's table: text, results file, work, and the variants of jgraph to choose the fastest from (all if empty).
GAINS = (
    ("GPT, 12 layers of 256, 2 x 128 tokens: launches limit the step", "single_gpu", "launch-bound", ()),
    ("GPT 124M, bf16", "single_gpu", "gpt-124m", ()),
    ("GPT 1.3B, bf16", "single_gpu_1b3", "gpt-1b3", ()),
    ("GPT 124M, FP8", "fp8", "gpt-124m", ("fp8=delayed", "fp8=current")),
    ("GPT 1.3B, FP8", "fp8_1b3", "gpt-1b3", ("fp8=delayed", "fp8=current")),
    ("GPT 1.3B, FP8, state sharded over 2 GPUs", "fsdp_fp8", "gpt-1b3", ("fp8=delayed", "fp8=current")),
    ("GPT with 8 experts, 2 per token, bf16", "moe", "gpt-moe", ()),
    ("Small MLPs, pipeline of 2 GPUs", "pipeline2", "mlp-launch-bound", ()),
    ("Large MLPs, pipeline of 2 GPUs", "pipeline2", "mlp-large", ()),
    ("12 small GPT blocks as graphed callables, called one by one", "callables1", "blocks", ("one by one",)),
)


def write_readme(check: bool) -> int:
    """Writes the pages with tables.

    Args:
        check: Write nothing; only compare.

    Returns:
        The exit code: 1 if `check` is True and a page differs from the results.
    """
    pages = {README: _with_tables(README, gains()), PAGE: _with_tables(PAGE, speed())}
    pages |= {page: new for page in sorted(runner.RESULTS.glob("*.md")) if (new := drawn(page))}
    drifted = [page for page, new in pages.items() if page.read_text() != new]
    if check and drifted:
        names = ", ".join(page.name for page in drifted)
        print(f"{names}: differs from the results; run python -m benchmarks readme", file=sys.stderr)
        return 1
    for page in drifted:
        page.write_text(pages[page])
    return 0


def _with_tables(page: Path, tables: str) -> str:
    """Returns the text of a page with other tables between its markers."""
    head, begin, rest = page.read_text().partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ResultsError(f"{page} must have {BEGIN} and then {END}, for the tables to go between")
    return f"{head}{BEGIN}\n{tables}\n{END}{tail}"


def gains() -> str:
    """Draws README's table: for each row of `GAINS`, the time of the fastest peer of each kind, over the time of jgraph."""
    lines = []
    for text, file, work, variants in GAINS:
        rows = read(runner.RESULTS / f"{file}.json")[work]["rows"]
        ours = fastest([row for row in rows if not variants or row["variant"] in variants], "jgraph")
        groups: dict[str, list[Row]] = {"jax": [], "torch": [], "te": []}
        for row in rows:
            is_engine = row["system"] == "torch" and precision(row) == "te"
            if row["system"] in groups:
                groups["te" if is_engine else row["system"]].append(row)
        cells = [_gain(fastest(own, "jax" if kind == "jax" else "torch"), ours) for kind, own in groups.items()]
        lines += [[text, f"{short(ours['ms'])} ms" if ours else "", *cells]]
    heads = ["training step or work", "jgraph", "`jax.jit` + optax", "PyTorch", "Transformer Engine"]
    return "\n".join(markdown(heads, lines))


def _gain(peer: Row | None, ours: Row | None) -> str:
    if not (peer and ours):
        return "not measured"
    return f"{ratio(peer, ours, digits=2).partition(' ')[0]} x ({short(peer['ms'])} ms)"


def drawn(page: Path) -> str:
    """Draws the table of a results file by its benchmark; empty where that is gone."""
    works = read(page.with_suffix(".json"))
    if page.stem == "soaks":
        return draw_soaks(works)
    name = benchmark_of(page.stem, scripts := find_benchmarks())
    return importlib.import_module(f"benchmarks.{name}").BENCHMARK.draw(works) if name in scripts else ""


def speed() -> str:
    """Draws the tables of the benchmarks page, each after a heading, a sentence, and the versions and dates of its results."""
    data = {file.stem: read(file) for file in sorted(runner.RESULTS.glob("*.json"))}
    blocks = max((name for name in data if "blocks" in data[name]), key=lambda name: distinct(data[name].values(), "date"))
    one = [name for name in ("single_gpu", "single_gpu_1b3") if name in data]
    works = [item for name in one for item in data[name].items()]
    several = [name for kind in SEVERAL for name in data if name.rstrip("0123456789") == kind]
    several = [name for name in several if any(result["ranks"] > 1 for result in data[name].values())]
    several += [name for name in data if name.endswith("_earlier")]
    fp8 = [name for name in data if "fp8" in name and benchmark_of(name, IN_FP8) in IN_FP8]
    moe = [name for name in data if benchmark_of(name, ("moe",)) == "moe" and name not in fp8]
    spread = [name for name in ("fsdp_experts",) if name in data]
    tables = [
        (
            "Training step on one GPU",
            "Each cell is the median time of a training step in milliseconds.",
            one,
            one_gpu(works),
        ),
        (
            "Graphed callables",
            "Twelve launch-bound GPT blocks run forward and backward. `host us a call` is the host time of one of the 24 "
            "calls, until the work is handed to the GPU.",
            [blocks],
            one_by_one(data[blocks]["blocks"]["rows"]),
        ),
        (
            "MultiGPUOptions GPUs",
            "Times are medians in milliseconds: a whole training step for `fsdp`, loss and gradients for `pipeline` and "
            "`callables`.",
            several,
            several_gpus(data),
        ),
        (
            "FP8",
            "Times are medians in milliseconds: a training step, or loss and gradients for pipelines. Each column shows its "
            "fastest variant.",
            fp8,
            in_fp8(("pipeline, " * ("pipeline" in name) + work, one) for name in fp8 for work, one in data[name].items()),
        ),
        (
            "Text generation",
            "Each time is the median in milliseconds per token, greedy, for one prompt.",
            [name for name in ("decode",) if name in data],
            markdown(HEADS, [comparison_cells(work, one, [one["rows"]]) for work, one in data.get("decode", {}).items()]),
        ),
        (
            "Mixtures of experts",
            "Times are medians in milliseconds: a training step, or forward and backward of the layers for `-layers`.",
            [*moe, *spread],
            markdown(
                HEADS,
                [comparison_cells(f"{work}, {shape(one)}", one, [one["rows"]]) for name in moe for work, one in data[name].items()]
                + [line for name in spread for item in data[name].items() for line in with_experts(*item)],
            ),
        ),
        (
            "Grouped matmuls in bfloat16",
            "Each cell is the rate of jgraph in TFLOP/s, and the time of PyTorch over the time of jgraph.",
            [name for name in ("grouped",) if name in data],
            grouped(data.get("grouped", {})),
        ),
        (
            "Soak runs",
            "Each run repeats one step many times with collectives inside CUDA graphs, and checks for hangs, growth of memory "
            "and changed losses.",
            [name for name in ("soaks",) if name in data],
            markdown(SOAKS, soaks(data["soaks"])) if "soaks" in data else [],
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


def one_gpu(works: Sequence[tuple[str, Row]]) -> list[str]:
    """Draws steps by preset: of ours the fastest kernels, and every variant that was timed for any preset."""
    heads = {
        ("jgraph", ""): "jgraph",
        ("jgraph", "graph=off"): "jgraph, graphs off",
        ("jax", "same"): "jax.jit + optax, same model",
        ("jax", "same flatten"): "same model, optax.flatten",
        ("jax", "stock"): "jax.jit + optax, stock parts",
        ("jax", "stock flatten"): "stock parts, optax.flatten",
        ("torch", "compile + CUDA graph"): "torch.compile + CUDA graph",
        ("torch", "compile"): "torch.compile",
        ("torch", "eager"): "torch eager",
        ("torch", "compile max-autotune + CUDA graph"): "torch max-autotune + CUDA graph",
    }
    found, lines = [], []
    for _, result in works:
        ours = fastest([row for row in result["rows"] if is_usual(row)], "jgraph")
        by = {(row["system"], row["variant"]): row["ms"] for row in result["rows"] if "ms" in row}
        found.append((ours, by | ({("jgraph", ""): ours["ms"]} if ours else {})))
    shown = [variant for variant in heads if any(variant in by for _, by in found)]
    for (preset, result), (ours, by) in zip(works, found, strict=True):
        rows, config, best = result["rows"], result["config"], min((by[v] for v in shown if v in by), default=None)
        times = [("**{}**" if by[v] == best else "{}").format(short(by[v])) if v in by else "not run" for v in shown]
        model, peer = config["model"], fastest(rows, "torch")
        shape = f"{model['num_layers']} layers of {model['d_model']}, {config['batch_size']}x{config['seq_len']} tokens"
        sizes = [row.get("peak_bytes") if row else None for row in (ours, peer)]
        peaks = ", ".join(f"{size / 1e9:.{1 if size >= 1e9 else 2}f}" if size else "not told" for size in sizes)
        lines += [[f"{preset}, {shape}", *times, f"{ratio_text(peer, ours)}, {count_peers(rows)}" if peer and ours else "", peaks]]
    return markdown(["preset", *(heads[v] for v in shown), "fastest PyTorch / jgraph", "peak GB, ours and its"], lines)


def grouped(works: dict[str, Row]) -> list[str]:
    """Draws grouped products by what they are for: the rate of ours, and PyTorch's time over it."""
    legs = {"forward": "forward", "dgrad": "dgrad", "wgrad": "wgrad", "onto_float32": "wgrad onto float32"}
    lines = []
    for work, result in works.items():
        peer, ours = (fastest(result["rows"], system) for system in ("torch", "jgraph"))
        flops = 2 * math.prod(result["size"]["shape"][:3])
        told = [f"{flops / ours[f'{leg}_ms'] / 1e9:.0f}, {ratio(peer, ours, f'{leg}_ms', digits=2)}" for leg in legs if ours]
        lines += [[work, result["device"] or "not told", *told]]
    return markdown(["rows x in x out", "device", *legs.values()], lines)


def with_experts(work: str, result: Row) -> Iterable[list[str]]:
    """Draws a mixture over several GPUs: ours with its experts spread, and with all gathered, against PyTorch's spread ones."""
    for kind, is_spread in (("experts over GPUs", True), ("experts gathered", False)):
        rows = [row for row in result["rows"] if row["system"] == "torch" or ("layout=ep" in row["variant"]) == is_spread]
        yield comparison_cells(f"{work}, {shape(result)}, {kind}", result, [rows])


def is_usual(row: Row) -> bool:
    """Returns whether a row is of a preset as it comes; it takes the fastest kernels by itself, which a row may ask for."""
    return row["system"] == "jgraph" and all(word.startswith(("attention=", "norm=")) for word in row["variant"].split())


def one_by_one(rows: list[Row]) -> list[str]:
    """Draws what a replay costs the host, of ours and of the graphed callables of PyTorch."""
    peer = next((row for row in rows if (row["system"], row["variant"]) == ("torch", "graphed callables")), {})
    lines = []
    for row in rows:
        cells = [named(row)]
        for key, digits in (("host_us", 1), ("ms", 2)):
            cells += [f"{row[key]:.{digits}f}" if key in row else row.get("failed", "did not run")]
            cells += ["" if row is peer else ratio(row, peer, key, digits=2)]
        lines += [cells]
    return markdown(["calls", "host us a call", "to PyTorch's", "ms an iteration", "to PyTorch's"], lines)


def several_gpus(data: dict[str, dict[str, Row]]) -> list[str]:
    """Draws works by number of GPUs: a ratio of rounds where peers took turns, else the range of all stored runs."""
    lines: list[tuple[int, list[str]]] = []
    for name, works in data.items():
        if (kind := name.rstrip("0123456789")) in SEVERAL:
            for work, result in ((work, result) for work, result in works.items() if result["ranks"] > 1):
                title = f"{kind}, {work}" if shape(result) in work else f"{kind}, {work}, {shape(result)}"
                if "config" in result:
                    found = [(f"{title}, parameters {how}", [rows]) for how, rows in group_by_placement(result["rows"]).items()]
                else:
                    found = [(title, stored(data, name, work))]
                lines += [(result["ranks"], comparison_cells(title, result, runs)) for title, runs in found]
    return markdown(HEADS, [cells for _, cells in sorted(lines, key=lambda one: one[0])])


def in_fp8(works: Iterable[tuple[str, Row]]) -> list[str]:
    """Draws works by what becomes of parameters: steps in bf16 and by each recipe, and the fastest of both sides."""
    heads = ["work", "devices", "jgraph bf16", "jgraph FP8, current", "jgraph FP8, delayed"]
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
                *(("torch", kind) for kind in ("bf16", "float8", "te")),
            ]
            best = {own: fastest(kinds.get(own, []), own[0]) for own in shown}
            ours = fastest([row for own in shown[1:3] for row in kinds.get(own, [])], "jgraph")
            peer, plain = fastest(rows, "torch"), best["jgraph", "bf16"]
            title = f"{work}, {shape(result)}" + f", parameters {kind}" * (len(groups) > 1)
            times = [short(row["ms"]) if row else "did not run" * (own in kinds) for own, row in best.items()]
            torchs = f"{ratio_text(peer, ours)} ({how(peer)}; {count_peers(rows)})" if ours and peer else count_peers(rows)
            own = ratio_text(plain, ours) if ours and plain else ""
            lines += [[title, result["device"] or "not told", *times, torchs, own]]
    return markdown([*heads, "fastest PyTorch / jgraph FP8", "jgraph bf16 / FP8"], lines)


def precision(row: Row) -> str:
    words = set(row["variant"].replace("=", " ").replace(":", " ").split())
    return next((word for word in ("te", "current", "delayed", "float8") if word in words), "bf16")


def shape(result: Row) -> str:
    """Names the size of a work's batch."""
    size = result.get("config") or result["size"]
    if "tokens" in size:
        return f"d {size['d_model']}, {size['tokens']} tokens"
    batch, length = (size["batch_size"], size["seq_len"]) if "config" in result else (size["batch"], size["length"])
    return f"{batch}x{length} tokens"


def stored(data: dict[str, dict[str, Row]], name: str, work: str) -> list[list[Row]]:
    """Returns the rows of all stored runs of a work, its own first; of other benchmarks' runs of its size PyTorch's alone."""
    own, before = data[name][work], f"{name}_earlier"
    runs = [own["rows"], *(result["rows"] for name_, result in data.get(before, {}).items() if name_ == work)]
    others = (result for file, works in data.items() if file not in (name, before) for result in works.values())
    same = (one for one in others if (one.get("size"), one.get("ranks")) == (own["size"], own["ranks"]))
    return [*runs, *([row for row in one["rows"] if row["system"] == "torch"] for one in same)]
