"""What a changelog has that an older one has not."""

from __future__ import annotations

import re
from collections.abc import Iterator


def news(before: str, now: str) -> str:
    """Return the entries that are new, each below the headings of its version and its kind.

    Args:
        before: a changelog in Markdown, with `## [version]` and, in it, `### Kind`.
        now: a later one of the same form.
    """
    known = set(_entries(before))
    told: list[str] = []
    shown: tuple[str, ...] = ()
    for entry in _entries(now):
        if entry in known:
            continue
        *headings, text = entry
        told += [
            heading for level, heading in enumerate(headings) if tuple(headings[: level + 1]) != shown[: level + 1]
        ]
        told.append(text)
        shown = tuple(headings)
    return re.sub(r"\n\n(?=- )", "\n", "\n\n".join(told))


def _entries(changelog: str) -> Iterator[tuple[str, ...]]:
    """Yield each item of a list, with what is indented below it, or paragraph, after the headings that it is below."""
    headings: list[str] = []
    for block in re.split(r"\n\n(?! )|\n(?=- )", changelog):
        text = block.strip("\n")
        if text.startswith("#"):
            heading, _, rest = text.partition("\n")
            level = len(heading) - len(heading.lstrip("#"))
            headings = [*(above for above in headings if above.index(" ") < level), heading]
            text = rest.strip("\n")
        if text and len(headings) > 1:
            yield (*headings[1:], text)
