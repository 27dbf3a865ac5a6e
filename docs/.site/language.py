"""A hook of MkDocs: pages say in which language they are, to screen readers and to whoever chooses a font."""

from __future__ import annotations

from typing import Any


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Set the language of a whole page whose folder in docs/ has its name."""
    folder = page.file.src_uri.partition("/")[0]
    return output.replace('<html lang="en"', f'<html lang="{folder}"', 1) if folder.startswith("zh-") else output
