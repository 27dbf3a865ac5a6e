"""Whose an error in a run is: the user's to mend, told in a line, or a bug's, which keeps its traceback.

Read from the traceback's text, as that is all that comes back from a process which Python forked or spawned.
"""

from __future__ import annotations

import logging
import re
import traceback
from importlib.util import find_spec
from pathlib import Path

from omegaconf import DictConfig

log = logging.getLogger(__name__)

_ON_PURPOSE = ("ValueError", "FileNotFoundError", "ModuleNotFoundError")


def told(error: Exception, cfg: DictConfig) -> str | None:
    """A line for what the user can mend; None for a bug.

    The model's and the data's own code speaks to the user where it raises a ValueError by a `raise` of its own: of a
    batch, a file, a size. One that comes from elsewhere, or that Python raises, is a bug.
    """
    text = _traceback(error)
    said: list[tuple[str, str]] = re.findall(r"^([\w.]+): (.*)", text, re.MULTILINE)
    kind, message = said[-1] if said else ("", "")
    if kind.startswith("lightswitch."):  # the engine has exceptions for the user alone
        return message
    frames = re.findall(r'^ *File "(.+)", line \d+, in .*\n *(.*)', text, re.MULTILINE)
    if kind not in _ON_PURPOSE or not frames:
        return None
    file, statement = frames[-1]
    for node in ("model", "data"):
        if statement.startswith("raise ") and any(map(Path(file).is_relative_to, _places(cfg.get(node)))):
            return f"{node}: {message}"
    return None


def keep(error: Exception) -> None:
    """The traceback, in the run's log file alone."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            record = (log.name, logging.ERROR, __file__, 0, _traceback(error), (), None)
            handler.handle(log.makeRecord(*record))


def _places(node: DictConfig | None) -> list[str]:
    """Folders of the package that a config node names code of, or its one file."""
    spec = find_spec(str(node._target_).partition(".")[0]) if node else None
    if spec is None:
        return []
    return list(spec.submodule_search_locations or [str(spec.origin)])


def _traceback(error: Exception) -> str:
    if type(error).__name__ == "ProcessRaisedException":  # torch's, of a process that it started
        return str(error)
    return "".join(traceback.format_exception(error))
