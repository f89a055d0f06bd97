"""Public names: each can be imported and is listed, and `import jgraph` does not import jax."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import jgraph

ROOT = Path(__file__).parents[1]


def test_every_public_name_can_be_imported_and_is_listed():
    for name in jgraph.__all__:
        found = getattr(jgraph, name)
        assert isinstance(found, str | tuple) or found.__module__.startswith("jgraph."), name  # a constant has no module
    assert {"train_step", "__version__"} < {*jgraph.__all__} == {*dir(jgraph)}


def test_the_types_that_public_functions_return_are_public():
    found = {name: getattr(jgraph, name) for name in jgraph.__all__}
    annotations = {name: inspect.signature(each).return_annotation for name, each in found.items() if inspect.isfunction(each)}
    names = {name: getattr(each, "__name__", each) for name, each in annotations.items()}
    modules = {name: str(getattr(annotations[name], "__module__", "jgraph")) for name in names}
    ours = {name: kind for name, kind in names.items() if modules[name].startswith("jgraph") and isinstance(kind, str)}
    assert ours["train_step"] == "TrainStep"
    assert {name: kind for name, kind in ours.items() if kind not in jgraph.__all__} == {}


def test_the_version_has_three_parts():
    assert jgraph.__version__.count(".") == 2


def test_importing_the_library_does_not_import_jax():
    code = "import sys, jgraph, jgraph.train.config; jgraph.ConfigError; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_no_package_below_the_application_imports_models_by_name():
    library = [path for path in (ROOT / "jgraph").rglob("*.py") if "train" not in path.parts]
    dynamic = re.compile(r"import_module\(\s*f?[\"']jgraph_models|__import__\([\"']jgraph_models")
    assert [path for path in library if dynamic.search(path.read_text())] == []
