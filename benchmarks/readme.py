"""README's tables of speed and the tables of all results, written from benchmarks/results."""

import importlib
import math
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import runner
from benchmarks.compare import ResultsError, distinct, read
from benchmarks.rows import Row, fastest, named, ratio
from benchmarks.runner import SOAKS, benchmark_of, draw_soaks, found, soaks
from benchmarks.tables import HEADS, alike, how, markdown, short, told_ratio, tried, versus

README = Path(__file__).parents[1] / "README.md"
SEVERAL = ("pipeline", "fsdp", "callables")  # benchmarks of several GPUs, in README's order
IN_FP8 = ("fp8", "fsdp", "moe", "pipeline")  # benchmarks that have FP8 in results named so
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"


def write_readme(check: bool) -> int:
    """Returns the exit code: 1 where a page is not what the results say and only that was asked."""
    text = README.read_text()
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end and "\n## Speed\n" in head):
        raise ResultsError(f"{README} must have {BEGIN} and then {END} in its section ## Speed, for the tables to go between")
    pages = {README: f"{head}{BEGIN}\n{speed()}\n{END}{tail}"}
    pages |= {page: new for page in sorted(runner.RESULTS.glob("*.md")) if (new := drawn(page))}
    drifted = [page for page, new in pages.items() if page.read_text() != new]
    if check and drifted:
        names = ", ".join(page.name for page in drifted)
        print(f"{names}: not what the results say; run python -m benchmarks readme", file=sys.stderr)
        return 1
    for page in drifted:
        page.write_text(pages[page])
    return 0


def drawn(page: Path) -> str:
    """Draws the table of a results file by its benchmark; empty where that is gone."""
    works = read(page.with_suffix(".json"))
    if page.stem == "soaks":
        return draw_soaks(works)
    name = benchmark_of(page.stem, scripts := found())
    return importlib.import_module(f"benchmarks.{name}").BENCHMARK.draw(works) if name in scripts else ""


def speed() -> str:
    """Draws the tables, each after a line that says where and when."""
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
            f"One {distinct([result for _, result in works], 'device')}",
            one,
            "Milliseconds a training step, median:",
            one_gpu(works),
        ),
        (
            "Twelve launch-bound GPT blocks one by one",
            [blocks],
            "Host time until an iteration is handed over, over its 24 calls, and the whole iteration:",
            one_by_one(data[blocks]["blocks"]["rows"]),
        ),
        (
            "Several GPUs",
            several,
            "Milliseconds, median: a whole training step of fsdp, loss and gradients of pipeline and callables:",
            several_gpus(data),
        ),
        (
            "Products in FP8",
            fp8,
            "Milliseconds a training step, of pipelines its loss and gradients, median; of each kind the fastest:",
            in_fp8(("pipeline, " * ("pipeline" in name) + work, one) for name in fp8 for work, one in data[name].items()),
        ),
        (
            "Greedy text after one prompt",
            [name for name in ("decode",) if name in data],
            "Milliseconds a token, median:",
            markdown(HEADS, [versus(work, one, [one["rows"]]) for work, one in data.get("decode", {}).items()]),
        ),
        (
            "Mixtures of experts",
            [*moe, *spread],
            "Milliseconds, median: a training step, of `-layers` forward and backward of the layers alone:",
            markdown(
                HEADS,
                [versus(f"{work}, {shape(one)}", one, [one["rows"]]) for name in moe for work, one in data[name].items()]
                + [line for name in spread for item in data[name].items() for line in with_experts(*item)],
            ),
        ),
        (
            "Grouped products in bfloat16",
            [name for name in ("grouped",) if name in data],
            "TFLOP/s, and PyTorch's time over ours:",
            grouped(data.get("grouped", {})),
        ),
    ]
    parts: list[str] = []
    for title, used, note, table in (table for table in tables if table[1]):
        results = [result for name in used for result in data[name].values()]
        jax, torch, dates = (distinct(results, key) for key in ("jax", "torch", "date"))
        links = ", ".join(f"[{name}](benchmarks/results/{name}.md)" for name in used)
        text = f"{title}, jax {jax} against PyTorch {torch}, {dates} ({links}). {note}"
        parts += [textwrap.fill(text, 128, break_long_words=False, break_on_hyphens=False), "", *table, ""]
    if "soaks" in data:
        parts += [*markdown(SOAKS, soaks(data["soaks"])), ""]
    return "\n".join(parts[:-1])


def one_gpu(works: Sequence[tuple[str, Row]]) -> list[str]:
    """Draws steps by preset: of ours the fastest kernels, and every variant that was timed for any preset."""
    heads = {
        ("jgraph", ""): "jgraph",
        ("jgraph", "graph=off"): "jgraph, graphs off",
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
        lines += [[f"{preset}, {shape}", *times, f"{told_ratio(peer, ours)}, {tried(rows)}" if peer and ours else "", peaks]]
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
        yield versus(f"{work}, {shape(result)}, {kind}", result, [rows])


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
                    found = [(f"{title}, parameters {how}", [rows]) for how, rows in alike(result["rows"]).items()]
                else:
                    found = [(title, stored(data, name, work))]
                lines += [(result["ranks"], versus(title, result, runs)) for title, runs in found]
    return markdown(HEADS, [cells for _, cells in sorted(lines, key=lambda one: one[0])])


def in_fp8(works: Iterable[tuple[str, Row]]) -> list[str]:
    """Draws works by what becomes of parameters: steps in bf16 and by each recipe, and the fastest of both sides."""
    heads = ["work", "devices", "jgraph bf16", "jgraph FP8, current", "jgraph FP8, delayed"]
    heads += ["torch bf16", "torchao float8", "Transformer Engine FP8"]
    lines = []
    for work, result in works:
        groups = alike(result["rows"])
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
            torchs = f"{told_ratio(peer, ours)} ({how(peer)}; {tried(rows)})" if ours and peer else tried(rows)
            own = told_ratio(plain, ours) if ours and plain else ""
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
    runs = [own["rows"], *(result["rows"] for named, result in data.get(before, {}).items() if named == work)]
    others = (result for file, works in data.items() if file not in (name, before) for result in works.values())
    same = (one for one in others if (one.get("size"), one.get("ranks")) == (own["size"], own["ranks"]))
    return [*runs, *([row for row in one["rows"] if row["system"] == "torch"] for one in same)]
