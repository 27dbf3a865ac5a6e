"""Whose an error in a run is: the user's to mend, told in a line, or a bug's, which keeps its traceback.

Read from the traceback's text, as that is all that comes back from a process which Python forked or spawned.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from importlib.util import find_spec
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lightswitch.launch import crash, placement, processes
from lightswitch.launch.mistakes import EXIT_CODE
from lightswitch.launch.watch.failure import Failure, Rank, node_name, of_error
from lightswitch.refused import Refused, ToldElsewhere

log = logging.getLogger(__name__)

_ON_PURPOSE = ("ValueError", "FileNotFoundError", "ModuleNotFoundError")


def answer(error: Exception, cfg: DictConfig) -> int | None:
    """The exit code, once the user is told; None for a bug in a run of one process, which keeps its traceback."""
    if isinstance(error, ToldElsewhere):
        return EXIT_CODE
    if processes.are_watched.is_set():
        from lightswitch.launch.watch import callback  # it imports torch, as this process has

        return callback.answered(error, cfg).exit_code
    report = crash.of(Path(HydraConfig.get().runtime.output_dir))
    if (code := report.exit_code()) is not None:  # a rank that this process has started has told it
        return code
    rank = _rank(error, cfg)
    first = failure(error, cfg, rank)
    if first.exit_code == EXIT_CODE:
        if not isinstance(error, Refused):  # that says all, and the run directory of a refused run is not to be filled
            keep(error)
        print(first.line, file=sys.stderr)
        return EXIT_CODE
    if rank.world_size in (1, None) and not _started_here(error):
        return None
    crash.to_torchrun(first)
    return report.tell(first)


def is_known() -> bool:
    """The ranks have agreed on what failed first."""
    if not processes.are_watched.is_set():
        return False
    from lightswitch.launch.watch import callback  # it imports torch, as this process has

    return callback.verdict() is not None


def failure(error: Exception, cfg: DictConfig, rank: Rank) -> Failure:
    if type(error).__name__ == "ProcessExitedException":  # it has no words of its own
        how = str(error).partition(" terminated with ")[2]
        return Failure(f"{rank} failed: process {rank.pid} ended with {how}")
    if type(error).__name__ == "LostRank":  # in a save, which torch is imported for; it names the rank itself
        return Failure(str(error), _traceback(error))
    problem = told(error, cfg)
    problems = error.problems if isinstance(error, Refused) else [problem] if problem else []
    if not problems:
        return of_error(rank, error)
    return Failure("\n".join(f"error: {problem}" for problem in problems), exit_code=EXIT_CODE)


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


def _rank(error: Exception, cfg: DictConfig) -> Rank:
    """As far as a process knows that has not met the others."""
    place = placement.detect()
    world = place.nodes * (place.devices_per_node or 1) if place.is_external else int(os.environ.get("WORLD_SIZE", 1))
    number = place.rank
    if not place.is_external:
        node, local = (int(os.environ.get(name, 0)) for name in ("NODE_RANK", "LOCAL_RANK"))
        number = node * (world // max(1, cfg.trainer.num_nodes)) + local
    if _started_here(error):
        return Rank(error.error_index, None, node_name(), error.error_pid)  # type: ignore[attr-defined]  # of torch's ProcessException
    return Rank(number, world, node_name(), os.getpid())


def _started_here(error: Exception) -> bool:
    """It is torch's, of a rank that this process had started."""
    return type(error).__name__ in ("ProcessRaisedException", "ProcessExitedException")


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
