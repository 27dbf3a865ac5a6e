"""The engine's exceptions and exit codes, and how the commands beside train.py end by them.

    Exception
    ├── Refused                    the user can fix it: printed in lines without a traceback
    │   ├── RefusedRequest         several problems of one request
    │   │   ├── Unplanned          nothing can be known of a run before it starts
    │   │   └── ChangedDependency  a library is not what it was in the versions that were tried
    │   ├── NotFinite              the loss or a parameter is not finite
    │   ├── UnequalReplicas        ranks hold different values of the same parameter
    │   ├── ToldElsewhere          another process of the run prints it
    │   ├── UnfitCheckpoint        a checkpoint does not fit the model, or can't be read
    │   ├── UntrustedConfig        a config beside weights names code that is not known to be the caller's own
    │   ├── UnwrittenCheckpoint    a checkpoint could not be written (also an OSError)
    │   ├── IrregularFile          a pipe, a device or a link where a file was expected (also an OSError)
    │   └── NoExperiment           a module asks for its logger's experiment, and it has none (also an AttributeError)
    ├── BatchError                 a number of samples that is less than one (a ValueError)
    ├── NeedsValues                a step goes by values that a plan can't guess (a RuntimeError)
    ├── LostRank                   a rank failed, or exceeded a timeout (a RuntimeError)
    └── RanksFailed                ranks failed that this process has spawned, taking no part in the run itself

    SystemExit
    ├── Stopped                    a signal asked the run to end before it was finished
    └── Ended                      the run failed, and its ranks have printed why

Errors of damaged files (an unsafe pickle, an index that is cut short) stay inside of their package: callers that read a
checkpoint see UnfitCheckpoint.
"""

from __future__ import annotations

import argparse
import enum
import os
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from pathlib import Path


class ExitCode(enum.IntEnum):
    """Exit codes of a process of a run; slurm/job.sh and torchrun act on them."""

    FAILED = 1  # a bug, a lost rank, a job of a sweep that failed
    REFUSED = 2  # the user can fix it: started again, it would be refused as well
    REQUEUE = 75  # asks the job script to requeue it, from a container that has no scontrol (EX_TEMPFAIL of sysexits.h)
    INTERRUPTED = 128 + signal.SIGINT  # Ctrl+C has ended it before it was finished
    STOPPED = 128 + signal.SIGTERM  # SIGTERM, or a scheduler's notice, has ended it before it was finished

    @staticmethod
    def of_signal(number: int) -> int:
        """Return the exit code of a process that a signal has killed, as a shell counts it."""
        return 128 + number


class Refused(Exception):
    """A problem that the user can fix; its text says what was found, what was expected, and what to type instead.

    Attributes:
        details: tracebacks of the user's own code behind it, which go only to the run's log.
    """

    details = ""

    @property
    def problems(self) -> list[str]:
        """The problems, a line each."""
        return [str(self)]


class RefusedRequest(Refused):
    """All problems of one request.

    Args:
        problems: a line each; one text of them all, as an exception is unpickled with.
        details: see `Refused`.
    """

    def __init__(self, problems: Iterable[str] | str, details: str = "") -> None:
        self._problems = problems.split("\n") if isinstance(problems, str) else list(problems)
        self.details = details
        super().__init__("\n".join(self._problems))

    @property
    def problems(self) -> list[str]:
        return self._problems


class Unplanned(RefusedRequest):
    """A run of which nothing can be known before it starts: its model or its data fail without values, or at all."""


class ChangedDependency(RefusedRequest):
    """An attribute of a library that the engine replaces is gone, or is not what it was in the versions tried."""

    def __init__(self, problem: str) -> None:
        super().__init__([problem])


class NotFinite(Refused):
    """A loss or a parameter that is not finite: started again from the same checkpoint, the run would meet it again."""


class UnequalReplicas(Refused):
    """Ranks that hold different values of what is one parameter: what is saved would be those of one of them."""


class ToldElsewhere(Refused):
    """A problem that another process of the run prints, so that this one prints nothing."""

    @property
    def problems(self) -> list[str]:
        return []


class UnfitCheckpoint(Refused):
    """A checkpoint, an export or a file of weights that does not fit the model, or can't be read."""


class UntrustedConfig(Refused):
    """A config that lies beside weights, and names code that is not known to be the caller's own."""


class UnwrittenCheckpoint(Refused, OSError):
    """A checkpoint that could not be written. The one before it is unchanged."""


class IrregularFile(Refused, OSError):
    """A pipe, a device, a directory or a link in the place of a file that is to be read or written."""


class NoExperiment(Refused, AttributeError):
    """Error of `self.logger.experiment.add_image` of a logger that takes none; `hasattr` takes it for its answer."""


class BatchError(ValueError):
    """A global batch or a micro batch of less than one sample."""


class NeedsValues(RuntimeError):
    """A step that goes by values of tensors, which a plan can't guess; the text says what it does and where."""


class LostRank(RuntimeError):
    """A rank that failed, or exceeded a timeout that the others met: no problem of the request."""


@dataclass(frozen=True)
class Failure:
    """A failure of a rank, as plain data that can be sent to the others.

    Args:
        line: what the user reads first.
        details: a traceback, or the ranks' positions. With exit code 2 it goes only to the run's log.
        follows: whether it looks like the consequence of another rank's failure.
        rank: the number of the rank that raised it.
        lacks_memory: whether memory ran out, of a device or a node.
    """

    line: str
    details: str = ""
    exit_code: int = ExitCode.FAILED
    follows: bool = False
    rank: int | None = None
    lacks_memory: bool = False


class RanksFailed(Exception):
    """Ranks failed that this process has spawned; it takes no part in the run itself.

    Args:
        is_told: whether the ranks have printed the failure.
        exit_code: of the first rank that ended; None if it was killed.
    """

    def __init__(self, failure: Failure, is_told: bool, exit_code: int | None) -> None:
        self.failure, self.is_told, self.exit_code = failure, is_told, exit_code
        super().__init__(failure.line)


class Stopped(SystemExit):
    """A signal has asked the run to end before it is finished.

    Args:
        by: that signal.
    """

    def __init__(self, by: signal.Signals) -> None:
        self.by = by
        self.exit_code = ExitCode.INTERRUPTED if by == signal.SIGINT else ExitCode.STOPPED
        super().__init__(self.exit_code)


class Ended(SystemExit):
    """The run has failed, and its ranks have printed why."""


def nearest(word: str, choices: Iterable[str], alike: float = 0.5) -> str:
    """Return ' Did you mean X?' for a choice of the same letters, else one that begins with the word, else the most
    similar one, or nothing.

    Args:
        alike: the least similarity, from 0 to 1.
    """
    lowered = {choice.lower(): choice for choice in choices}
    same = [choice for choice in lowered if sorted(choice) == sorted(word.lower())]  # two letters in the other order
    longer = [choice for choice in lowered if len(word) > 2 and choice.startswith(word.lower())]
    close = same or sorted(longer, key=lambda choice: (len(choice), choice))
    close = close or get_close_matches(word.lower(), lowered, n=1, cutoff=alike)
    return f" Did you mean {lowered[close[0]]}?" if close else ""


def listed(words: Sequence[str], noun: str = "", shown: int = 3, separator: str = ", ") -> str:
    """Return words for a message: the first few, and how many more, as in 'a, b, c and 2 more nodes'."""
    more = f" and {len(words) - shown} more {noun}".rstrip() if len(words) > shown else ""
    return separator.join(words[:shown]) + more


def shown(path: Path) -> str:
    """Return a path as it can be pasted: relative where it lies below the working directory."""
    here = os.getcwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def printable(text: str) -> str:
    """Return a text without what a terminal acts on: control characters, and those that turn the order of letters."""
    return re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", "\ufffd", text)


class Command(argparse.ArgumentParser):
    """Parser of a command's arguments, which refuses as train.py does: a line on stderr, and exit code 2.

    From here on Ctrl+C ends the process without a traceback.

    Args:
        name: of the module that is run.
        description: its docstring, printed by --help as it is.
    """

    def __init__(self, name: str, description: str | None) -> None:
        sys.excepthook = _tell
        super().__init__(
            f"python -m {name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def error(self, message: str) -> NoReturn:
        """End the process with the message, and without argparse's lines of usage."""
        print(f"error: {printable(message)}", file=sys.stderr)
        raise SystemExit(ExitCode.REFUSED)


def _tell(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print a traceback as Python does, and of Ctrl+C a line: Python then ends by the signal, as shells expect."""
    if issubclass(kind, KeyboardInterrupt):
        print("stopped    by SIGINT", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)
