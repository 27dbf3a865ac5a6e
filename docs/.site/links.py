"""A hook of MkDocs: links that leave docs/ lead to the repository where it is known, and to nothing elsewhere."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\(\.\./([^)\s]+)\)")


def on_page_markdown(markdown: str, config: Any, page: Any, **_: Any) -> str:
    """Rewrite the links of a page of docs/ to files beside it in the repository."""
    if "/" in page.file.src_uri:  # of a folder in docs/, from where ../ is docs/ itself
        return markdown
    address = (config.repo_url or "").rstrip("/")
    by = rf"[\1]({address}/blob/main/\2)" if address else r"\1"
    return _OUTSIDE.sub(by, markdown)
