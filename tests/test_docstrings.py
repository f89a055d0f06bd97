"""Docstrings document arguments and results; messages, test names and tables have few hard-to-read phrases."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
Function = ast.FunctionDef | ast.AsyncFunctionDef

PHRASES = ["said", "told", "whose", "those that", "that which", "of which", "one that", "which of", "nothing but"]
PATTERN = re.compile(r"\b(" + "|".join(PHRASES) + r")\b", re.IGNORECASE)
PRINTING = {"print", "line", "log", "warn", "warning", "info", "error", "debug", "write"}


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


# Types that users get from exported functions, beside the exported names themselves.
RETURNED = {
    *("TrainStep", "TrainState", "StepMetrics", "CompiledStep", "FunctionalModel", "GraphedCallables", "Graphed", "RunResult"),
    *("FP8Function", "Loaded", "Explanation", "Jitted", "Tokenizer"),
}


def exported() -> set[str]:
    """Returns the names in `jgraph/__init__.pyi`."""
    return set(re.findall(r"\w+ as (\w+)", (ROOT / "jgraph/__init__.pyi").read_text(encoding="utf-8")))


def functions_of_users() -> Iterator[tuple[str, Function, list[str]]]:
    """Yields path and name, node and argument names of each function and method that users call or implement."""
    names = exported() | RETURNED
    for file in sources("jgraph"):
        path = str(file.relative_to(ROOT))
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if not isinstance(node, Function | ast.ClassDef):
                continue
            is_protocol = isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Protocol" for base in node.bases)
            if node.name not in names and not (is_protocol and path == "jgraph/strategies/base.py"):
                continue
            for each in node.body if isinstance(node, ast.ClassDef) else [node]:
                if not isinstance(each, Function) or each.name.startswith("_"):
                    continue
                if not any("overload" in ast.unparse(decorator) for decorator in each.decorator_list):
                    given = each.args
                    args = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
                    kept = [arg.arg for arg in args if arg and arg.arg not in ("self", "cls")]
                    yield f"{path}: {node.name}.{each.name}", each, kept


def documented_args(docstring: str) -> set[str]:
    """Returns the names in the `Args:` section. An entry may name several arguments."""
    found = re.search(r"^Args:\n((?:[ ]{4}.*\n?|\n)+)", docstring, re.MULTILINE)
    entries = re.findall(r"^ {4}([*\w`][*\w`, ]*):", found[1], re.MULTILINE) if found else []
    return {name.strip(" *`") for entry in entries for name in entry.split(",")}


def test_functions_of_users_document_their_arguments():
    found = list(functions_of_users())
    assert len(found) > 100
    bad = [name for name, node, args in found if len(args) > 1 and set(args) - documented_args(ast.get_docstring(node) or "")]
    assert not bad, "add `Args:` with every argument to:\n" + "\n".join(bad)


def test_functions_of_users_document_their_results():
    documented = re.compile(r"\A(Returns|Yields)\b|^(Returns|Yields):$", re.MULTILINE)
    bad = [
        name
        for name, node, args in functions_of_users()
        if len(args) > 1 and node.returns and ast.unparse(node.returns) not in ("None", "NoReturn")
        if not documented.search(ast.get_docstring(node) or "")
    ]
    assert not bad, "add `Returns:` to:\n" + "\n".join(bad)


def strings(node: ast.AST) -> list[str]:
    return [each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)]


def messages() -> Iterator[str]:
    """Yields the string literals of raised errors and printed lines."""
    for file in sources("jgraph"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and node.exc:
                yield from strings(node.exc)
            elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in PRINTING:
                yield from (text for arg in node.args for text in strings(arg))


def names_of_tests() -> Iterator[str]:
    for file in sources("tests"):
        for name in re.findall(r"^\s*(?:async )?def test_(\w+)", file.read_text(encoding="utf-8"), re.MULTILINE):
            yield name.replace("_", " ")


def tables() -> Iterator[str]:
    for page in [ROOT / "README.md", *sorted(ROOT.glob("notes/**/*.md"))]:
        for line in page.read_text(encoding="utf-8").splitlines():
            if line.startswith("|"):
                yield re.sub(r"`[^`]*`", "", line)


@pytest.mark.parametrize(("texts", "most"), [(messages, 2), (names_of_tests, 3), (tables, 2)])
def test_phrases_that_are_hard_to_read_are_rare(texts, most):
    lines = list(texts())
    words = sum(len(re.findall(r"[A-Za-z']+", line)) for line in lines)
    bad = [line for line in lines for _ in PATTERN.finditer(line)]
    rate = 1000 * len(bad) / max(words, 1)
    assert rate <= most, f"{rate:.1f} of {', '.join(PHRASES)} per 1,000 words, at most {most}; rewrite:\n" + "\n".join(bad)
