"""A profile as one HTML file that asks nothing of any server: the template with the profile as JSON inside it."""

import importlib.resources
import json
from typing import Any

_PLACE = "PROFILE AS JSON"


def page(profile: dict[str, Any]) -> str:
    """The page of a profile in format 2. Raises ValueError for NaN and infinities, which JSON does not have."""
    # A name with "</script>" in it would end the script that holds the JSON.
    text = json.dumps(profile, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    template = importlib.resources.files("jgraph.profile").joinpath("page.html").read_text(encoding="utf-8")
    return template.replace(_PLACE, text, 1)
