"""MkDocs hooks: addresses of pyproject.toml, links from a page to files outside `notes/`, and flags that stay on a line."""

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(\]\()(?!https?:|#|mailto:)([^)\s#]+)((?:#[^)\s]*)?\))")
_CODE = re.compile(r"<code>.*?</code>", re.DOTALL)
_FLAG = re.compile(r"(?<=[\s>])--\w[\w.-]*")


def on_config(config: Any) -> Any:
    """Takes the addresses of the site and of the repository from pyproject.toml."""
    urls = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    config["site_url"] = urls["Documentation"]
    config["repo_url"] = urls["Repository"]
    config["repo_name"] = "GitHub"
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replaces relative links that leave the documentation.

    Args:
        markdown: Source of the page.
        page: The page.
        config: The configuration of the site. `repo_url` is the address of the repository.
        files: The files of the site.

    Returns:
        The source with absolute links.
    """
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(link: re.Match[str]) -> str:
        # Relative to `notes/`, the folder of the documentation.
        path = posixpath.normpath(posixpath.join(folder, link[2]))
        if not path.startswith("../"):
            return link[0]
        return f"{link[1]}{config['repo_url'].rstrip('/')}/blob/main/{path.removeprefix('../')}{link[3]}"

    return _LINK.sub(replaced, markdown)


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """Marks the flags in code, because browsers break a line after a hyphen (`.flag` in `notes/assets/site.css`)."""
    return _CODE.sub(lambda code: _FLAG.sub(r'<span class="flag">\g<0></span>', code[0]), content)
