"""Files, modules and flags named in README, guides and notes exist, and code snippets run."""

import ast
import importlib
import importlib.util
import re
import subprocess
import tomllib
from pathlib import Path
from textwrap import dedent

import pytest

import jgraph
from jgraph.cli import flag
from jgraph.settings import flatten
from jgraph.train.presets import preset

ROOT = Path(__file__).parents[1]
HOME = [ROOT / "README.md", ROOT / "notes/index.md"]
PAGES = [*HOME, *sorted(ROOT.glob("notes/*/*.md"))]
# Measurements name files, options and flags as of their date, so only their links are checked.
MEASUREMENTS = sorted(ROOT.glob("notes/develop/measurements/*.md"))
GUIDES = [
    *HOME,
    *(page for room in ("start", "guide", "concepts", "coming-from") for page in sorted(ROOT.glob(f"notes/{room}/*.md"))),
]
# Code in a tab is indented.
SNIPPET = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
SNIPPETS = [
    pytest.param(dedent(code), id=f"{page.name}-{i}", marks=[pytest.mark.target] if "target=" in code else [])
    for page in GUIDES
    for i, (_, code) in enumerate(SNIPPET.findall(page.read_text(encoding="utf-8")))
]
GENERATED = {
    "config.json",
    "metrics.jsonl",
    "samples.jsonl",
    "report.html",
    "tensorboard/",
    "wandb.json",
    "profile.json",
    "profile/profile.html",
    "profile/profile.json",
    "tokenizer.json",
    "checkpoints/",
    "tokens/",
    "texts/",
    "pages.jsonl",
    "origin/",
    "my_model.py",
    "first_step.py",
}
OTHERS = {"--help", "--check", "--local-dir", "--ntasks", "--model.width", "--logdir", "--no-build-isolation"}
# Of srun and torchrun.
OTHERS |= {"--ntasks-per-node", "--gpus-per-node", "--gpus-per-task", "--nodes", "--signal"}
OTHERS |= {"--nnodes", "--nproc-per-node", "--max-restarts", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"}
PATH = re.compile(r"[\w./-]+(?:\.(?:py|md|json|jsonl|html|toml|svg|png)|/)")


def text_of(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    # The first column of these tables has flags and names of other projects.
    return re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE) if page.parent.name == "coming-from" else text


def quoted(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text_of(page))


def files() -> list[str]:
    found = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines()
    found = found or [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.is_file()]
    folders = {f"{parent.as_posix()}/" for name in found for parent in Path(name).parents}
    return [f"/{name}" for name in (*found, *folders)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_named_on_a_page_exists(page):
    existing = files()
    named = {name for name in quoted(page) if PATH.fullmatch(name)} - GENERATED
    assert [name for name in sorted(named) if not any(path.endswith(f"/{name}") for path in existing)] == []


@pytest.mark.parametrize("page", [*PAGES, *MEASUREMENTS], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_on_a_page_leads_to_a_file(page):
    links = re.findall(r"\]\(([\w./-]+\.\w+)\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_and_name_on_a_page_exists(page):
    commands = re.findall(r"python -m ([\w.]+)", text_of(page))
    assert [module for module in commands if importlib.util.find_spec(module) is None] == []
    assert [name for name in quoted(page) if re.fullmatch(r"jgraph(\.\w+)+", name) and not exists(name)] == []


def exists(name: str) -> bool:
    module, *parts = name.split(".")
    found = importlib.import_module(module)
    for part in parts:
        module = f"{module}.{part}"
        if not hasattr(found, part) and (not hasattr(found, "__path__") or importlib.util.find_spec(module) is None):
            return False
        found = getattr(found, part, None) or importlib.import_module(module)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_on_a_page_exists(page):
    sources = [*ROOT.glob("jgraph/**/*.py"), *ROOT.glob("benchmarks/*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    # Known flags are fields of dataclasses, parameters of functions that tyro calls, and flags of argparse.
    known = {f"--{name.replace('_', '-')}" for name in re.findall(r"^ +(\w+): ", text, re.MULTILINE)}
    known |= set(re.findall(r'"(--[\w-]+)"', text)) | {flag(name) for name in flatten(preset("cpu-tiny").to_dict())}
    named = set(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", text_of(page))) - OTHERS
    assert [name for name in sorted(named) if name not in known and name.replace("--no-", "--", 1) not in known] == []


@pytest.mark.long
@pytest.mark.parametrize("code", SNIPPETS)
def test_every_snippet_of_a_guide_runs_alone_and_prints_its_comments(code, capsys, request):
    if "target=" in code:
        request.getfixturevalue("h200")
    exec(compile(code, "snippet", "exec"), {"__name__": "snippet"})
    printed = capsys.readouterr().out
    assert [line for line in re.findall(r"^# (.*)$", code, re.MULTILINE) if line not in printed] == []


def test_every_page_named_in_the_code_exists():
    for path in [*ROOT.glob("jgraph/**/*.py"), *ROOT.glob("models/**/*.py"), *ROOT.glob("benchmarks/**/*.py")]:
        for name in re.findall(r"\bnotes/[\w/]+\.\w+", path.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{path.relative_to(ROOT)} names {name}"


def test_every_row_of_the_upstream_table_names_existing_tests():
    rows = [
        line
        for line in (ROOT / "notes/develop/upstream.md").read_text().splitlines()
        if re.match(r"\| (TE|Megatron-LM) #", line)
    ]
    assert {row.split("|")[1].strip() for row in rows} == {"TE #2376", "TE #2937", "Megatron-LM #3970", "Megatron-LM #4663"}
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, f"no test: {row}"
        for path, name in named:
            assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path} has no {name}"


def test_functions_named_with_a_file_on_the_upstream_page_are_in_that_file():
    text = (ROOT / "notes/develop/upstream.md").read_text()
    pairs = [
        (file, name)
        for file, names in re.findall(r"`([\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", text)
        for name in re.findall(r"\w+", names)
    ]
    assert pairs
    missing = [(file, name) for file, name in pairs if not re.search(rf"\b{name}\b", (ROOT / "jgraph" / file).read_text())]
    assert not missing


def test_readme_clones_the_repository_of_the_package():
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    assert f"git clone {urls['Repository']} && cd jgraph" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_page_of_xla_options_lists_those_that_the_code_sets():
    sources = [*ROOT.glob("jgraph/**/*.py"), *ROOT.glob("models/**/*.py")]
    nodes = [node for path in sources for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    option = r"xla_(?:backend|cpu|dump|enable|gpu)_\w+(?:=\w+)?"
    code = {found for text in texts for found in re.findall(option, text)}
    page = set(re.findall(f"`({option})`", (ROOT / "notes/guide/xla-options.md").read_text(encoding="utf-8")))
    advised = {"xla_gpu_command_buffer_unroll_loops", "xla_enable_dumping"}  # in messages only
    assert {name.partition("=")[0] for name in page} == {name.partition("=")[0] for name in code} - advised
    # Options of strategies and presets are texts with a value.
    assert {name for name in code if "=" in name and name.partition("=")[0] not in advised} <= page


def test_the_reference_has_one_entry_per_public_name():
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "notes" / "reference").glob("*.md"))
    # mkdocstrings takes jgraph.compare and jgraph.plan for the rooms, not for the functions.
    names = re.findall(r"^::: jgraph\.(?:(?:compare\._compare|plan\._plan)\.)?(\w+)$", pages, re.MULTILINE)
    assert sorted(names) == sorted({*jgraph.__all__} - {"__version__"})


def test_the_reading_order_is_five_short_files_that_say_what_to_look_for():
    text = (ROOT / "notes/develop/reading-order.md").read_text(encoding="utf-8")
    files = [(ROOT / path).read_text(encoding="utf-8") for path in re.findall(r"^\| `(\S+\.py)` \|", text, re.MULTILINE)]
    assert len(files) == 5
    assert sum(len(file.splitlines()) for file in files) <= 1200
    assert all("\nLook for: " in file.partition('"""\n')[0] for file in files)
