"""The commands beside train.py: what is typed after `python -m lightswitch.NAME`."""

from __future__ import annotations

import argparse
import sys
from types import TracebackType
from typing import NoReturn

from lightswitch.errors import ExitCode, printable


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
