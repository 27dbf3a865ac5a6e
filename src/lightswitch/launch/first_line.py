"""The line that a start shows at once on a terminal, from argv alone: the next one comes after seconds of imports."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from lightswitch.cluster import placement
from lightswitch.errors import RefusedRequest
from lightswitch.preflight import environment

_QUESTIONS = {"--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc"}
_SWEEPS = {"--multirun", "-m"}


def show(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> None:
    """Print the line if stdout is a terminal, where someone may be waiting.

    Ranks other than 0 print nothing. Neither do `--help` and its like, which answer as fast.

    Args:
        arguments: `sys.argv[1:]`.
    """
    if sys.stdout.isatty() and _is_first(environ) and not _QUESTIONS & {word.partition("=")[0] for word in arguments}:
        print(text(arguments), flush=True)


def text(arguments: Sequence[str]) -> str:
    """Return which process on which machine reads the config, and what comes after."""
    mode = ["fit", *(word.partition("=")[2] for word in arguments if word.startswith("mode="))][-1]
    after = "starts its jobs" if _SWEEPS & set(arguments) else f"imports torch, for mode={mode}"
    return f"process    {os.getpid()} on {os.uname().nodename} reads the config, then {after}"


def _is_first(environ: Mapping[str, str]) -> bool:
    try:
        environment.check(environ)
    except RefusedRequest:  # told with all that is wrong, once there is something to tell it
        return False
    return placement.detect(environ).rank == 0
