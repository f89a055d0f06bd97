"""Pages that open anywhere: one HTML file each, with its look, script and data in it, that asks nothing of any server.

`page.html` is what all have: the look, themes, tables, tips. A room with a page has `page.css` and `page.js`, which finds its
data in `P` and ends with `build([...])` of its panels.
"""

import importlib.resources
import json
from typing import Any


def render(room: str, data: dict[str, Any]) -> str:
    """Returns the page of a package as HTML.

    Args:
        room: the package, e.g. `jgraph.profile`.
        data: what the page shows: a "title", and what its script reads.

    Raises:
        ValueError: the data has NaN or infinity, which JSON lacks.
    """
    # A name with "</script>" in it would end the script that holds the JSON.
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    html = _read("jgraph", "page.html").replace("STYLE OF THE PAGE\n", _read(room, "page.css"), 1)
    return html.replace("SCRIPT OF THE PAGE\n", _read(room, "page.js"), 1).replace("DATA AS JSON", text, 1)


def _read(package: str, name: str) -> str:
    return importlib.resources.files(package).joinpath(name).read_text(encoding="utf-8")
