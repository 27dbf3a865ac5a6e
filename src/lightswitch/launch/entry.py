"""The entry point of train.py, which prints a line at once, and then imports the slow modules.

Called by other code, or in a notebook, it refuses: a run has processes of its own (lightswitch.train).
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from lightswitch.cluster import placement
from lightswitch.errors import ExitCode, encode_any_text

if TYPE_CHECKING:
    from lightswitch.launch.hydra_entry import Main

_QUESTIONS = {"--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc"}
_SWEEPS = {"--multirun", "-m"}
_NO_SCRIPT = (
    "error: a run starts as a script, in a process of its own; in place of main(), type "
    "lightswitch.train('strategy=ddp', …), or in a notebook !python train.py strategy=ddp"
)


def entry(config_path: str, config_name: str) -> Callable[[Main], Callable[[], None]]:
    """Decorate a script's main function as `hydra.main` does, and pass it the RunContext in addition to the config.

    Overrides need no `+`. A problem that the user can fix ends the process with exit code 2 and no traceback; a bug
    prints its traceback.
    """

    def decorate(main: Main) -> Callable[[], None]:
        @functools.wraps(main)
        def run() -> None:
            encode_any_text()
            if main.__module__ != "__main__" or hasattr(sys, "ps1") or sys.flags.interactive:
                print(_NO_SCRIPT, file=sys.stderr)
                raise SystemExit(ExitCode.REFUSED)
            _fix_hashes()
            sys.argv[0] = os.path.abspath(sys.argv[0])  # user code may change the working directory
            show_first_line(sys.argv[1:])
            try:
                from lightswitch.launch.hydra_entry import Entry  # importing Hydra takes as long as reading that line
            except KeyboardInterrupt:  # signals are not caught yet
                raise SystemExit(ExitCode.INTERRUPTED) from None

            Entry(main).run(config_path, config_name)

        return run

    return decorate


def _fix_hashes() -> None:
    """Start this process again with Python's hashes of text fixed, unless PYTHONHASHSEED is set.

    They are random in each process, and so is the order of a set of names, from which data code numbers its classes:
    ranks would train on different labels, and a resumed run on others than before. Python reads the variable only when
    it starts. A script that something else runs, as a notebook or a debugger, goes on as it is.
    """
    is_own = sys.orig_argv[-len(sys.argv) :] == sys.argv or placement.is_module()
    is_set = "PYTHONHASHSEED" in os.environ or sys.flags.ignore_environment
    if is_own and not _is_debugged() and not is_set and not _asks(sys.argv[1:]):
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _is_debugged() -> bool:
    """Return whether a debugger has set breakpoints in this process, or may be about to: a new one would not have them.

    Since Python 3.12, debuggers may be tools of `sys.monitoring`, of which `sys.gettrace` knows nothing.
    """
    monitoring = getattr(sys, "monitoring", None)
    has_tool = monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None
    return has_tool or sys.gettrace() is not None or not {"debugpy", "pydevd"}.isdisjoint(sys.modules)


def show_first_line(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> None:
    """Print the line if stdout is a terminal, where someone may be waiting.

    Ranks other than 0 print nothing. Neither do `--help` and similar options, which respond as fast.

    Args:
        arguments: `sys.argv[1:]`.
    """
    if sys.stdout.isatty() and _is_first(environ) and not _asks(arguments):
        print(first_line(arguments), flush=True)


def _asks(arguments: Sequence[str]) -> bool:
    return not _QUESTIONS.isdisjoint(word.partition("=")[0] for word in arguments)


def first_line(arguments: Sequence[str]) -> str:
    """Return a line that names this process and its machine, and what it does after it has read the config."""
    mode = ["fit", *(word.partition("=")[2] for word in arguments if word.startswith("mode="))][-1]
    after = "starts its jobs" if _SWEEPS & set(arguments) else f"imports torch, for mode={mode}"
    return f"process    {os.getpid()} on {os.uname().nodename} reads the config, then {after}"


def _is_first(environ: Mapping[str, str]) -> bool:
    try:
        return placement.detect(environ).rank == 0
    except (KeyError, ValueError):  # reported later, together with all other problems
        return False
