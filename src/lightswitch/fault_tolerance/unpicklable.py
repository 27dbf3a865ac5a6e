"""The search for what of a model or its data can't be pickled, and so not sent to a spawned process."""

from __future__ import annotations

import types
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torch import nn


def first_unpicklable(owners: dict[str, object]) -> str | None:
    """Return the path of the first value that can't be pickled, and the reason; None if all can be.

    Args:
        owners: objects by name; of a module, the attributes of every submodule are tried.
    """
    for name, owner in owners.items():
        if _reason(owner) is None:  # a class may leave out of its state what can't be pickled
            continue
        for path, value in _parts(name, owner):
            if (reason := _reason(value)) is not None:
                return f"{path} is {_kind(value)}" if isinstance(value, types.FunctionType) else f"{path}: {reason}"
    return None


def _parts(name: str, owner: object) -> Iterator[tuple[str, Any]]:
    parts = owner.named_modules(prefix=name) if isinstance(owner, nn.Module) else [(name, owner)]
    for path, part in parts:
        yield path, type(part)
        for attribute, value in vars(part).items():
            if attribute not in ("_modules", "_trainer", "trainer"):  # tried by themselves, or not sent
                yield f"{path}.{attribute}", value


def _reason(value: object) -> str | None:
    try:
        ForkingPickler.dumps(value)
    except Exception as error:  # each class pickles in its own way, and fails in its own way
        return str(error).partition("\n")[0] or type(error).__name__
    return None


def _kind(function: types.FunctionType) -> str:
    return "a lambda" if function.__name__ == "<lambda>" else f"a function inside of another, {function.__qualname__}"
