"""The rules for a run's name and id, which are folders of its directory, and words of the commands it prints."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_LONGEST = 128
_FORM = "letters, digits and . _ - = , are allowed"


def problems(names: Mapping[str, object]) -> Iterator[str]:
    """Yield what is wrong with names, and what to type instead.

    Args:
        names: by their keys, `{"run_id": "mine"}`.
    """
    for key, name in names.items():
        text = "" if name is None else str(name)
        if not text:
            yield f"{key} is empty; type {key}=NAME"
        elif text in (".", ".."):
            yield f"{key}={text} can't be the name of a folder; type {key}=NAME"
        elif not re.fullmatch(r"[A-Za-z0-9._=,-]+", text):
            yield f"{key}={text[:_LONGEST]!r} is no valid name: {_FORM}; type {key}=NAME"
        elif len(text) > _LONGEST:
            yield f"{key} has {len(text)} characters, and {_LONGEST} are allowed; type {key}=NAME"
