"""The engine's exceptions and exit codes, and the error handling of the commands beside train.py.

    Exception
    ├── Refused                    the user can fix it: printed in lines without a traceback
    │   ├── RefusedRequest         several problems of one request
    │   │   └── Unplanned          the run can't be planned before it starts
    │   ├── ReportedElsewhere      another process of the run prints the problem
    │   ├── UnfitCheckpoint        a checkpoint does not fit the model, or can't be read
    │   ├── UnwrittenCheckpoint    a checkpoint could not be written (also an OSError)
    ├── BatchError                 a batch size below one sample (a ValueError)
    └── LostRank                   a rank failed, or exceeded a timeout (a RuntimeError)

    SystemExit
    ├── Stopped                    a signal ended the run before it was finished
    └── Ended                      the run failed, and its ranks have printed why

Errors of damaged files (an unsafe pickle, a truncated index) are private to their package: callers that read a
checkpoint get UnfitCheckpoint.
"""

from __future__ import annotations

import argparse
import enum
import io
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
    REFUSED = 2  # a problem that the user can fix; a restart without a change fails in the same way
    REQUEUE = 75  # the job script has to requeue the job: the container has no scontrol (EX_TEMPFAIL of sysexits.h)
    INTERRUPTED = 128 + signal.SIGINT  # Ctrl+C ended the run before it was finished
    STOPPED = 128 + signal.SIGTERM  # SIGTERM or a scheduler's notice ended the run before it was finished

    @staticmethod
    def of_signal(number: int) -> int:
        """Return the exit code that a shell reports for a process that a signal has killed."""
        return 128 + number


def encode_any_text() -> None:
    """Let stdout and stderr replace characters that their encoding lacks, as ASCII lacks ×, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


class Refused(Exception):
    """A problem that the user can fix; its text says what was found, what was expected, and what to type instead.

    Attributes:
        details: tracebacks of the user's code that caused it, written only to the run's log.
    """

    details = ""

    @property
    def problems(self) -> list[str]:
        """The problems, one line each."""
        return [str(self)]


class RefusedRequest(Refused):
    """All problems of one request.

    Args:
        problems: one line each; or one string with a line for each, which unpickling passes.
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
    """A run that can't be planned before it starts, for example because its model fails on tensors without values."""


class ReportedElsewhere(Refused):
    """A problem that another process of the run prints; this process prints nothing."""

    @property
    def problems(self) -> list[str]:
        return []


class UnfitCheckpoint(Refused):
    """A checkpoint, an export or a weight file that does not fit the model, or can't be read."""


class UnwrittenCheckpoint(Refused, OSError):
    """A checkpoint that could not be written. The previous checkpoint is unchanged."""


class BatchError(ValueError):
    """A global batch or a micro-batch of less than one sample."""


class LostRank(RuntimeError):
    """A rank that failed, or that exceeded a timeout while the others did not; not a problem of the request."""


@dataclass(frozen=True)
class Failure:
    """A failure of a rank, as plain data that can be sent to the other ranks.

    Args:
        line: the line that the user reads first.
        details: a traceback, or the ranks' positions. With exit code 2 they go only to the run's log.
        follows: whether it looks like the consequence of another rank's failure.
        rank: the number of the rank that raised it.
        lacks_memory: whether a device or a node ran out of memory.
        signal: the signal that ended the rank; None if none did.
    """

    line: str
    details: str = ""
    exit_code: int = ExitCode.FAILED
    follows: bool = False
    rank: int | None = None
    lacks_memory: bool = False
    signal: int | None = None


class Stopped(SystemExit):
    """A signal ends the run before it is finished.

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
    """Return ' Did you mean X?', or an empty string.

    X is a choice with the same letters, else a choice that begins with the word, else the most similar choice.

    Args:
        alike: the minimum similarity, from 0 to 1.
    """
    lowered = {choice.lower(): choice for choice in choices}
    same = [choice for choice in lowered if sorted(choice) == sorted(word.lower())]  # swapped letters
    longer = [choice for choice in lowered if len(word) > 2 and choice.startswith(word.lower())]
    close = same or sorted(longer, key=lambda choice: (len(choice), choice))
    close = close or get_close_matches(word.lower(), lowered, n=1, cutoff=alike)
    return f" Did you mean {lowered[close[0]]}?" if close else ""


def listed(words: Sequence[str], noun: str = "", shown: int = 3, separator: str = ", ") -> str:
    """Return the first few words and the number of the others, for a message: 'a, b, c and 2 more nodes'."""
    more = f" and {len(words) - shown} more {noun}".rstrip() if len(words) > shown else ""
    return separator.join(words[:shown]) + more


def shown(path: Path) -> str:
    """Return a path to print and paste: relative if it is below the working directory that the command was typed in."""
    here = _typed_in()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _typed_in() -> str:
    """Return the working directory, before user code or hydra.job.chdir has changed it."""
    hydra = sys.modules.get("hydra.core.hydra_config")
    if hydra is not None and hydra.HydraConfig.initialized() and (cwd := hydra.HydraConfig.get().runtime.get("cwd")):
        return str(cwd)
    return os.getcwd()


def printable(text: str) -> str:
    """Return a text in which U+FFFD replaces control characters (not tab and newline), bidi controls and surrogates."""
    return re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", "\ufffd", text)


class Command(argparse.ArgumentParser):
    """Parser of a command's arguments. Like train.py, it reports errors in one line on stderr with exit code 2.

    Once it is constructed, Ctrl+C ends the process without a traceback.

    Args:
        name: the name of the module that is run.
        description: the module's docstring, which --help prints unchanged.
    """

    def __init__(self, name: str, description: str | None) -> None:
        sys.excepthook = _report
        encode_any_text()
        super().__init__(
            f"python -m {name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def error(self, message: str) -> NoReturn:
        """Print the message without argparse's usage lines, and end the process."""
        print(f"error: {printable(message)}", file=sys.stderr)
        raise SystemExit(ExitCode.REFUSED)


def _report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print a traceback as Python does, but one line for Ctrl+C. Python then ends by the signal, as shells expect."""
    if issubclass(kind, KeyboardInterrupt):
        print("stopped    by SIGINT", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)
