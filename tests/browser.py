"""Opens a page in a headless browser."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

CHROMIUM = shutil.which("chromium")
needed = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")

DARK = ("--blink-settings=preferredColorScheme=0",)
KEY = """const key = (target, key, options) =>
  target.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, ...options }));"""


def see(tmp_path: Path, page: str, expression: str, *, before: str = "", flags: tuple[str, ...] = ()) -> Any:
    """Returns the value of a JavaScript expression after the page is drawn and the statements `before` have run."""
    script = f"<script>{{ {before}\ndocument.documentElement.dataset.seen = JSON.stringify({expression}); }}</script>"
    path = tmp_path / "page.html"
    path.write_text(page.replace("</body>", script + "</body>"), encoding="utf-8")
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1000,3000",
    ]
    command += [*flags, f"--user-data-dir={tmp_path / 'user'}", "--dump-dom", path.as_uri()]
    dumped = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    root = re.search(r"<html[^>]*>", dumped)
    assert root, dumped[:200]
    found = dict(re.findall(r'data-(\w+)="([^"]*)"', root[0]))
    assert "error" not in found, html.unescape(found["error"])
    assert "ready" in found
    return json.loads(html.unescape(found["seen"]))


def data_in(page: str) -> dict[str, Any]:
    """Returns the JSON data embedded in a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def contrast(first: str, second: str) -> float:
    """Returns the contrast ratio of two colors `#RRGGBB`, as defined by WCAG 2."""

    def luminance(color: str) -> float:
        parts = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    dark, light = sorted(map(luminance, (first, second)))
    return (light + 0.05) / (dark + 0.05)


def themes(page: str) -> list[dict[str, str]]:
    """Returns the named colors `#RRGGBB` of a page in the light theme and in the dark theme."""
    found: dict[str, dict[str, str]] = {"": {}, "  ": {}}  # the dark theme is indented, in a media query
    for indent, colors in re.findall(r"^( *):root \{(.*?)\}", page, re.DOTALL | re.MULTILINE):
        for name, digits in re.findall(r"--([\w-]+): #(\w+);", colors):
            found[indent][name] = "#" + (digits if len(digits) == 6 else "".join(2 * digit for digit in digits))
    return list(found.values())
