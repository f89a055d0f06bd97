"""Renders HTML pages that need no server: each is one file with its style, script and data.

`page.html` has the shared style, themes, tables and tooltips. A package with a page adds `page.css` and `page.js`. The script
reads its data from `P` and ends with `build([...])` of its panels. `title` in the data is the title of the page.
"""

import importlib.resources
import json
from collections.abc import Mapping


def render(package: str, data: Mapping[str, object]) -> str:
    """Returns the page of a package, with `data` embedded as JSON. Raises ValueError for NaN or infinity, which JSON lacks."""
    # A name that contains "</script>" would end the script that holds the JSON.
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    html = _read("jgraph", "page.html").replace("STYLE OF THE PAGE\n", _read(package, "page.css"), 1)
    return html.replace("SCRIPT OF THE PAGE\n", _read(package, "page.js"), 1).replace("DATA AS JSON", text, 1)


def _read(package: str, name: str) -> str:
    return importlib.resources.files(package).joinpath(name).read_text(encoding="utf-8")
