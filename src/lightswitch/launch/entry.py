"""The entry of train.py: a line on the terminal at once, then everything that takes its time to import."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from lightswitch.errors import ExitCode
from lightswitch.launch import first_line

if TYPE_CHECKING:
    from lightswitch.launch.hydra_entry import Main


def entry(config_path: str, config_name: str) -> Callable[[Main], Callable[[], None]]:
    """Decorate a script's main function as `hydra.main` does, and pass it the RunContext beside the config.

    Arguments need no `+`. A problem that the user can fix ends with exit code 2 and no traceback; a bug keeps
    its traceback.
    """

    def decorate(main: Main) -> Callable[[], None]:
        @functools.wraps(main)
        def run() -> None:
            _open_closed_streams()
            first_line.show(sys.argv[1:])
            try:
                from lightswitch.launch.hydra_entry import Entry  # Hydra takes as long as a reader of that line
            except KeyboardInterrupt:  # signals are not caught yet
                raise SystemExit(ExitCode.INTERRUPTED) from None

            Entry(main).run(config_path, config_name)

        return run

    return decorate


def _open_closed_streams() -> None:
    """Lead stdout and stderr nowhere where they were closed: the next file to be opened would get their place."""
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number, which is the one that is free
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))
