"""Handlers of the terminal and of train.log, which holds lines in memory until the run begins."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path

from lightswitch import regular_files


class Terminal(logging.StreamHandler):  # type: ignore[type-arg]  # not generic before Python 3.11
    """Stream handler that ignores write errors, such as those of a closed terminal; a print there ends the run."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class RunLog(logging.FileHandler):
    """File handler that writes only once the run has begun, so that a refused start adds nothing to an earlier log."""

    def __init__(self, filename: str, mode: str = "a", encoding: str | None = "utf-8", delay: bool = True) -> None:
        super().__init__(filename, mode, encoding, delay=True)
        self._held: list[str] | None = []
        self._size_before = _size(self.baseFilename)

    def _open(self) -> TextIOWrapper:
        opener = regular_files.open_own
        return open(self.baseFilename, "a", encoding=self.encoding, errors=self.errors, opener=opener)

    @property
    def has_begun(self) -> bool:
        return self._held is None

    @property
    def held(self) -> list[str]:
        return self._held or []

    def emit(self, record: logging.LogRecord) -> None:
        if self._held is not None:
            self._held.append(self.format(record) + self.terminator)
            return
        try:
            super().emit(record)
        except OSError:  # the file is opened at the first write
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore disk errors, such as a full disk; the terminal has the same lines."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def hold(self, lines: list[str]) -> None:
        """Hold lines of an earlier process, to write them before this process's lines."""
        self._held = [*lines, *self.held]

    def begin(self) -> None:
        """Write the held lines; from now on, write immediately."""
        if self._held is not None:
            first, self._held = self._held, None
            if first:
                with self.lock or contextlib.nullcontext(), contextlib.suppress(OSError):
                    self.stream = self.stream or self._open()
                    self.stream.write("".join(first))
                    self.flush()

    def follow(self) -> None:
        """Drop the held lines if a process that this one has spawned has written them, and write immediately."""
        if self._held is not None and _size(self.baseFilename) != self._size_before:
            self._held = None


def has_begun() -> bool:
    """Return whether this process writes its log immediately, because the run has begun."""
    return any(handler.has_begun for handler in _handlers())


def hold(lines: list[str]) -> None:
    """Call `RunLog.hold` of this process's handlers."""
    for handler in _handlers():
        handler.hold(lines)


def begin() -> None:
    """Call `RunLog.begin` of this process's handlers."""
    for handler in _handlers():
        handler.begin()


def follow() -> None:
    """Call `RunLog.follow` of this process's handlers."""
    for handler in _handlers():
        handler.follow()


def files() -> list[Path]:
    """Return the files that this process's handlers write."""
    return [Path(handler.baseFilename) for handler in _handlers()]


def held() -> list[str]:
    """Return the lines that this process's handlers hold back."""
    return [line for handler in _handlers() for line in handler.held]


def _handlers() -> Iterator[RunLog]:
    return (handler for handler in logging.getLogger().handlers if isinstance(handler, RunLog))


def _size(path: str) -> int:
    return Path(path).stat().st_size if Path(path).exists() else -1
