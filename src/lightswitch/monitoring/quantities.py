"""Numbers as a person reads them."""

from __future__ import annotations

import math


def compact(number: float) -> str:
    """Return a number with three digits and a magnitude: 370, 45.2k, 1.23M."""
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
    """Return seconds as a clock shows them: 0:21, 1:02:03, and hours beyond a day as 51:00:00."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
