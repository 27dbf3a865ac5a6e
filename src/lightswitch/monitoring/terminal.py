"""One line of a terminal, redrawn in place, and what is printed meanwhile."""

from __future__ import annotations

import logging
import shutil
import sys
from contextlib import redirect_stdout
from typing import Any, TextIO


class Line:
    """Line that a terminal's cursor is on, redrawn in place; what is logged or printed meanwhile appears above it.

    Args:
        stream: of the terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._drawn = False
        self._handlers = _terminal_handlers()
        for handler in self._handlers:
            handler.addFilter(self._make_room)
        self._printed = _Printed(sys.stdout, self)
        self._printing: redirect_stdout[Any] = redirect_stdout(self._printed)
        self._printing.__enter__()

    def draw(self, label: str, done: int, total: int | None, status: str) -> None:
        """Draw `train  37% |███████             | 370/1000 · loss 2.31`, with as long a bar as fits."""
        width = shutil.get_terminal_size().columns - 1  # the last column would wrap in some terminals
        if total is None:
            text = f"{label} {done}{status}"
        else:
            before, after = f"{label} {100 * done // total:3}% ", f" {done}/{total}{status}"
            text = before + bar(done / total, width - len(before) - len(after)) + after
        if self._printed.is_open:
            self._printed.write("\n")
        encoding = self._stream.encoding or "ascii"
        shown = text[:width].encode(encoding, "replace").decode(encoding)
        self._write(f"\r{shown}\x1b[K")  # the escape erases what is left of a longer text
        self._drawn = True

    def clear(self) -> None:
        """Erase the line, until it is drawn again."""
        if self._drawn:
            self._write("\r\x1b[K")
            self._drawn = False

    def end(self) -> None:
        """Leave the text where it is and go to the next line."""
        self._printing.__exit__(None, None, None)
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


class _Printed:
    """Stream of what a user's code prints beside a line, which it never continues."""

    def __init__(self, stream: TextIO, line: Line) -> None:
        self._stream, self._line = stream, line
        self.is_open = False  # whether a line is begun and not ended

    def write(self, text: str) -> int:
        """Write a text where the line is, which is drawn again below it."""
        self._line.clear()
        self.is_open = not text.endswith("\n") if text else self.is_open
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def bar(fraction: float, room: int) -> str:
    """Return `|███████             |` of at most `room` characters; nothing where fewer than six are left."""
    width = min(room - 2, 20)
    if width < 4:
        return ""
    filled = int(width * fraction)
    return f"|{'█' * filled}{' ' * (width - filled)}|"


def _terminal_handlers() -> list[logging.Handler]:
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = [handler for logger in loggers for handler in getattr(logger, "handlers", [])]
    terminals = [stream for stream in (sys.stdout, sys.stderr) if stream.isatty()]
    return [h for h in handlers if isinstance(h, logging.StreamHandler) and h.stream in terminals]
