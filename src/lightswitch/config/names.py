"""What a run may be called: its name and its id are folders of its directory, and words of the commands it prints."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_LONGEST = 128
_FORM = "letters, digits and . _ - = , are allowed"


def problems(names: Mapping[str, object]) -> Iterator[str]:
    """
    Args:
        names: by the key that gives them, `{"run_id": "mine"}`.
    """
    for key, name in names.items():
        text = "" if name is None else str(name)
        if not text:
            yield f"{key} is empty; type {key}=NAME"
        elif text in (".", ".."):
            yield f"{key}={text} is no name of a folder of its own; type {key}=NAME"
        elif not re.fullmatch(r"[A-Za-z0-9._=,-]+", text):
            yield f"{key}={text[:_LONGEST]!r} is no name: {_FORM}; type {key}=NAME"
        elif len(text) > _LONGEST:
            yield f"{key} has {len(text)} characters, and {_LONGEST} are allowed; type {key}=NAME"
