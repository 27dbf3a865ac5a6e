"""A hook of MkDocs: README.md is the home page, and links that leave docs/ lead to the repository where it is known."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\(\.\./([^)\s]+)\)")
_RELATIVE = re.compile(r"\]\((?!\w+:|#)(docs/)?")


def on_page_markdown(markdown: str, config: Any, page: Any, **_: Any) -> str:
    """Rewrite the links of a page of docs/ to files beside it in the repository."""
    if "/" in page.file.src_uri:  # of a folder in docs/, from where ../ is docs/ itself
        return markdown
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["toc"]  # of a page without headings, where the widest output of a terminal is
        readme = Path(config.docs_dir).with_name("README.md").read_text()
        markdown = _RELATIVE.sub(lambda link: "](" if link[1] else "](../", readme)
    address = (config.repo_url or "").rstrip("/")
    by = rf"[\1]({address}/blob/main/\2)" if address else r"\1"
    return _OUTSIDE.sub(by, markdown)
