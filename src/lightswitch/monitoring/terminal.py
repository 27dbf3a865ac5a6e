"""One line of a terminal, redrawn in place."""

from __future__ import annotations

import logging
import shutil
from typing import TextIO


class Line:
    """The line that a terminal's cursor is on; records logged to the same terminal appear above it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._drawn = False
        self._handlers = _terminal_handlers()
        for handler in self._handlers:
            handler.addFilter(self._make_room)

    def draw(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1  # the last column would wrap in some terminals
        encoding = self._stream.encoding or "ascii"
        shown = text[:width].encode(encoding, "replace").decode(encoding)
        self._write(f"\r{shown}\x1b[K")  # the escape erases what is left of a longer text
        self._drawn = True

    def clear(self) -> None:
        if self._drawn:
            self._write("\r\x1b[K")
            self._drawn = False

    def end(self) -> None:
        """Leaves the text where it is and goes to the next line."""
        for handler in self._handlers:
            handler.removeFilter(self._make_room)
        if self._drawn:
            self._write("\n")
            self._drawn = False

    def _make_room(self, record: logging.LogRecord) -> bool:
        self.clear()
        return True

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def bar(done: int, total: int, width: int = 20) -> str:
    """` 37% |███████             |`"""
    filled = width * done // total
    return f"{100 * done // total:3}% |{'█' * filled}{' ' * (width - filled)}|"


def _terminal_handlers() -> list[logging.Handler]:
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = [handler for logger in loggers for handler in getattr(logger, "handlers", [])]
    return [h for h in handlers if isinstance(h, logging.StreamHandler) and h.stream.isatty()]
