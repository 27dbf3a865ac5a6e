"""A hook of MkDocs: README.md is the home page, measured tables are reference pages, and links that leave docs/ lead to
the repository where it is known."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_MEASURED = re.compile(r"\]\(((?:\.\./)*)\.\./tests/engine/tables/measured/")
_RELATIVE = re.compile(r"\]\((?!\w+:|#)(docs/)?")


def on_page_markdown(markdown: str, config: Any, page: Any, **_: Any) -> str:
    """Rewrite the links of a page to files of the repository outside docs/."""
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["toc"]  # leaves room for the widest output of a terminal
        readme = Path(config.docs_dir).with_name("README.md").read_text()
        markdown = _RELATIVE.sub(lambda link: "](" if link[1] else "](../", readme)
    markdown = _MEASURED.sub(r"](\1reference/", markdown)
    address = (config.repo_url or "").rstrip("/")
    by = rf"[\1]({address}/blob/main/\2)" if address else r"\1"
    up = re.escape("../" * (page.file.src_uri.count("/") + 1))  # from a page to the repository
    return re.sub(rf"(?<!!)\[([^\]]+)\]\({up}([^)\s]+)\)", by, markdown)
