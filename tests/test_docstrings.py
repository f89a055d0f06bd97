"""Docstrings are where readers are; messages, test names and tables have few hard-to-read phrases."""

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
    *(
        "FP8Function",
        "FP8Trace",
        "Loaded",
        "Explanation",
        "Memory",
        "CaptureReport",
        "CanonicalLayout",
        "Comparison",
        "Measurement",
        "Difference",
        "Jitted",
        "Split",
        "Tokenizer",
    ),
}
# Functions of rooms that guides import.
OF_ROOMS = {("schedule", "generate"), ("data", "load")}
# Files of protocols that strategies and models implement, and of commands, whose docstrings are their `--help`.
PROTOCOLS = re.compile(r"jgraph/(strategies/base|train/hooks|train/model)\.py")
COMMANDS = re.compile(r"jgraph/((.*/)?__main__|sample|evaluate|export|aot|inspect/_(capture|schedule))\.py")


def exported() -> set[tuple[str, str]]:
    """Returns room and name of each name in `jgraph/__init__.pyi`."""
    text = (ROOT / "jgraph/__init__.pyi").read_text(encoding="utf-8")
    imports = re.findall(r"^from \.(\w+)\S* import (\((?:[^)]*)\)|.*)$", text, re.MULTILINE)
    return {(room, name) for room, names in imports for name in re.findall(r"\w+ as (\w+)", names)}


def functions() -> Iterator[tuple[str, Function, bool]]:
    """Yields path and name, and node of each function and method, and whether users call or implement it."""
    shown = exported() | OF_ROOMS
    for file in sources("jgraph"):
        path = str(file.relative_to(ROOT))
        room = file.relative_to(ROOT / "jgraph").parts[0].removesuffix(".py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if not isinstance(node, Function | ast.ClassDef):
                continue
            is_interface = PROTOCOLS.fullmatch(path) is not None and isinstance(node, ast.ClassDef)
            is_shown = (room, node.name) in shown or node.name in RETURNED or is_interface
            for each in node.body if isinstance(node, ast.ClassDef) else [node]:
                if isinstance(each, Function) and not COMMANDS.fullmatch(path):
                    is_private = re.match(r"_(?!_)", each.name) is not None
                    yield f"{path}: {node.name}.{each.name}", each, is_shown and not is_private


def argument_names(node: Function) -> list[str]:
    args = [*node.args.posonlyargs, *node.args.args, node.args.vararg, *node.args.kwonlyargs, node.args.kwarg]
    return [arg.arg for arg in args if arg and arg.arg not in ("self", "cls")]


def functions_of_users() -> Iterator[tuple[str, Function, list[str]]]:
    """Yields path and name, node and argument names of each function and method that users call or implement."""
    for name, node, is_shown in functions():
        is_overload = any("overload" in ast.unparse(decorator) for decorator in node.decorator_list)
        # The docstring of a class documents its constructor.
        if is_shown and not is_overload and not node.name.startswith("_"):
            yield name, node, argument_names(node)


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


def test_other_functions_have_no_sections_of_arguments_and_results():
    section = re.compile(r"^(Args|Returns|Yields):$", re.MULTILINE)
    bad = [name for name, node, is_shown in functions() if not is_shown and section.search(ast.get_docstring(node) or "")]
    assert not bad, "say what a reader cannot see in one or two lines:\n" + "\n".join(bad)


def forwards(node: Function) -> bool:
    """True if a method only returns the attribute or the call of the same name and arguments of a part of its object."""
    body = node.body[1:] if ast.get_docstring(node) else node.body
    if len(body) != 1 or not isinstance(body[0], ast.Return) or body[0].value is None:
        return False
    value, given = body[0].value, argument_names(node)
    if isinstance(value, ast.Call):
        if [ast.unparse(arg).lstrip("*") for arg in value.args] != given or value.keywords:
            return False
        value = value.func
    return isinstance(value, ast.Attribute) and value.attr == node.name and ast.unparse(value).startswith("self.")


def test_methods_that_forward_have_no_docstring():
    bad = [name for name, node, is_shown in functions() if not is_shown and forwards(node) and ast.get_docstring(node)]
    assert not bad, "the method that is called is documented; remove the docstring of:\n" + "\n".join(bad)


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
