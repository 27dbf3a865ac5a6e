"""A hook of MkDocs: pages say in which language they are, to screen readers and to whoever chooses a font."""

from __future__ import annotations

from typing import Any

_LANGUAGES = {"zh": "zh-Hans"}  # by the folder in docs/


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Set the language of a whole page that is in a folder of its own."""
    language = _LANGUAGES.get(page.file.src_uri.partition("/")[0])
    return output.replace('<html lang="en"', f'<html lang="{language}"', 1) if language else output
