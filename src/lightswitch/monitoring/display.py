"""Text output for people: numbers, tables, and a terminal line that is redrawn in place. Imports no torch."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import stat
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from datetime import timedelta
from typing import Any, TextIO

from lightswitch.errors import printable


def compact(number: float) -> str:
    """Return a number with three digits and a unit prefix: 370, 45.2k, 1.23M."""
    if not math.isfinite(number):
        return str(number)
    for magnitude in ("", "k", "M", "G", "T"):
        if abs(number) < 999.5 or magnitude == "T":
            break
        number /= 1000
    digits = 0 if abs(number) >= 99.95 else 1 if abs(number) >= 9.995 else 2
    text = f"{number:.{digits}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) + magnitude


def clock(seconds: float) -> str:
    """Return a duration in clock format: 0:21, 1:02:03, or 51:00:00 beyond a day."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def table(rows: Mapping[str, object]) -> str:
    """Return one line per entry, names left-aligned and values right-aligned; None entries are left out.

    Integers get thousands separators, floats four digits, durations clock format; strings are unchanged.
    """
    return "\n".join(aligned([(name, _cell(value)) for name, value in rows.items() if value is not None], [0]))


def aligned(rows: Sequence[Sequence[str]], texts: Sequence[int] = ()) -> list[str]:
    """Return rows in aligned columns: those with an index in ``texts`` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index in texts else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def escaped(text: str) -> str:
    """Return a text as one line of Markdown, escaped: it starts no HTML, link or image, and ends no table cell."""
    line = " ".join(printable(text).split())
    for mark, instead in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("](", "]\\(")):
        line = line.replace(mark, instead)
    return line


def _cell(value: object) -> str:
    if isinstance(value, timedelta):
        return clock(value.total_seconds())
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
    return str(value)


class Line:
    """Line at a terminal's cursor, redrawn in place; anything logged or printed meanwhile appears above it.

    Args:
        stream: output stream of the terminal.
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
        """Draw `train  37% |███████             | 370/1000 · loss 2.31`, with a bar of at most the remaining width."""
        width = shutil.get_terminal_size().columns - 1  # some terminals wrap at the last column
        if total is None:
            text = f"{label} {done}{status}"
        else:
            before, after = f"{label} {100 * done // total:3}% ", f" {done}/{total}{status}"
            text = before + bar(done / total, width - len(before) - len(after)) + after
        if self._printed.is_open:
            self._printed.write("\n")
        encoding = self._stream.encoding or "ascii"
        shown = text[:width].encode(encoding, "replace").decode(encoding)
        self._write(f"\r{shown}\x1b[K")  # the escape code erases the rest of a longer text
        self._drawn = True

    def clear(self) -> None:
        """Erase the line until the next draw."""
        if self._drawn:
            self._write("\r\x1b[K")
            self._drawn = False

    def end(self) -> None:
        """Leave the text on the terminal, and move to the next line."""
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
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            leave_terminal()


def leave_terminal() -> None:
    """Discard what this process prints to a terminal from now on: it is closed, and each write would fail."""
    for stream in (1, 2):
        with contextlib.suppress(OSError):  # it is no stream any more
            if stat.S_ISCHR(os.fstat(stream).st_mode):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


class _Printed:
    """Stream that replaces stdout while a line is drawn, for output of the user's code."""

    def __init__(self, stream: TextIO, line: Line) -> None:
        self._stream, self._line = stream, line
        self.is_open = False  # whether the last printed text ends without a newline

    def write(self, text: str) -> int:
        """Erase the line and write a text in its place; the next draw is below the text."""
        self._line.clear()
        self.is_open = not text.endswith("\n") if text else self.is_open
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def bar(fraction: float, room: int) -> str:
    """Return `|███████             |` of at most `room` characters; an empty string if `room` is below six."""
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
