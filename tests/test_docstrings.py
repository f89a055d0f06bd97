"""Docstrings document arguments and results; messages, test names and tables have few hard-to-read phrases."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
Function = ast.FunctionDef | ast.AsyncFunctionDef

# Minimum shares of documented functions. Raise them when the documentation gets better.
MIN_ARGS = {2: 0.95, 3: 0.95}  # by number of arguments; 3 includes functions with more
MIN_RETURNS = 0.95

PHRASES = ["said", "told", "whose", "those that", "that which", "of which", "one that", "which of", "nothing but"]
PATTERN = re.compile(r"\b(" + "|".join(PHRASES) + r")\b", re.IGNORECASE)
PRINTING = {"print", "line", "log", "warn", "warning", "info", "error", "debug", "write"}


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def public_functions() -> Iterator[tuple[str, Function, list[str]]]:
    """Yields the path and name, the node and the argument names of each public function in `jgraph/`."""

    def inside(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Function, list[str]]]:
        for node in body:
            if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
                continue
            name = prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from inside(node.body, f"{name}.")
            elif not any("overload" in ast.unparse(decorator) for decorator in node.decorator_list):
                given = node.args
                args = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
                yield name, node, [arg.arg for arg in args if arg and arg.arg not in ("self", "cls")]

    for file in sources("jgraph"):
        path = file.relative_to(ROOT)
        if not any(part.startswith("_") for part in path.parts if part != "__init__.py"):
            yield from inside(ast.parse(file.read_text(encoding="utf-8")).body, f"{path}: ")


def documented_args(docstring: str) -> set[str]:
    """Returns the names in the `Args:` section. An entry may name several arguments."""
    found = re.search(r"^Args:\n((?:[ ]{4}.*\n?|\n)+)", docstring, re.MULTILINE)
    entries = re.findall(r"^ {4}([*\w`][*\w`, ]*):", found[1], re.MULTILINE) if found else []
    return {name.strip(" *`") for entry in entries for name in entry.split(",")}


def assert_share(bad: list[str], total: int, minimum: float, problem: str) -> None:
    share = 1 - len(bad) / max(total, 1)
    assert share >= minimum, f"{share:.2f} of {total} functions, needs {minimum}; {problem}:\n" + "\n".join(bad)


@pytest.mark.parametrize("count", MIN_ARGS)
def test_public_functions_document_their_arguments(count):
    functions = [each for each in public_functions() if min(len(each[2]), max(MIN_ARGS)) == count]
    bad = [name for name, node, args in functions if set(args) - documented_args(ast.get_docstring(node) or "")]
    assert_share(bad, len(functions), MIN_ARGS[count], "add `Args:` with every argument to")


def test_public_functions_document_their_results():
    functions = [
        (name, ast.get_docstring(node) or "")
        for name, node, args in public_functions()
        if len(args) >= 2 and node.returns and ast.unparse(node.returns) not in ("None", "NoReturn")
    ]
    documented = re.compile(r"\A(Returns|Yields)\b|^(Returns|Yields):$", re.MULTILINE)
    bad = [name for name, text in functions if not documented.search(text)]
    assert_share(bad, len(functions), MIN_RETURNS, "add `Returns:` to")


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
