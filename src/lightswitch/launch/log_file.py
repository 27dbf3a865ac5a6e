"""The run's log file. Imports no torch."""

from __future__ import annotations

import logging
import sys


class LogFile(logging.FileHandler):
    """Of a disk that is full it says nothing: the terminal has the same lines, and what fails for it is told."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # it is opened when it is first written to
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)
