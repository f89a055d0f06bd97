"""Renders HTML pages that need no server: each is one file with its style, script and data.

`page.html` has the shared style, themes, tables and tooltips. A package with a page adds `page.css` and `page.js`. The script
reads its data from `P` and ends with `build([...])` of its panels.
"""

import importlib.resources
import json
from collections.abc import Mapping


def render(package: str, data: Mapping[str, object]) -> str:
    """Returns the HTML page of a package, with its data embedded as JSON. Writes no file.

    Args:
        package: Name of a package that contains the files `page.css` and `page.js`, for example `jgraph.profile`.
        data: The object that the script `page.js` reads: "title", the text of the page's title, and the fields that the script
            needs. All values must be JSON values.

    Returns:
        The text of the whole page, a single file without references to other files.

    Raises:
        ValueError: If the data contains NaN or infinity, which JSON lacks.
        TypeError: If the data contains a value that is not a JSON value.
        FileNotFoundError: If the package lacks `page.css` or `page.js`.
    """
    # A name that contains "</script>" would end the script that holds the JSON.
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    html = _read("jgraph", "page.html").replace("STYLE OF THE PAGE\n", _read(package, "page.css"), 1)
    return html.replace("SCRIPT OF THE PAGE\n", _read(package, "page.js"), 1).replace("DATA AS JSON", text, 1)


def _read(package: str, name: str) -> str:
    return importlib.resources.files(package).joinpath(name).read_text(encoding="utf-8")
