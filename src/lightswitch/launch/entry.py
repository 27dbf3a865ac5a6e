"""The entry point of train.py, which prints a line at once, and then imports the slow modules.

Called by other code, or in a notebook, it refuses: a run has processes of its own (lightswitch.train).
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightswitch.launch.hydra_entry import Main

_QUESTIONS = {"--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc"}
_LIGHT = ("__about__", "metric", "collections", "aggregation")  # of torchmetrics: base classes, means, its version
_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")
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
            is_script = main.__module__ == "__main__" and not hasattr(sys, "ps1") and not sys.flags.interactive
            if is_script:
                _name_script()
                _fix_hashes()
            from lightswitch.errors import ExitCode, encode_any_text  # not above: Python starts again there

            encode_any_text()
            if not is_script:
                print(_NO_SCRIPT, file=sys.stderr)
                raise SystemExit(ExitCode.REFUSED)
            sys.argv[0] = os.path.abspath(sys.argv[0])  # user code may change the working directory
            show_first_line(sys.argv[1:])
            _defer_torchmetrics()
            try:
                from lightswitch.launch.hydra_entry import Entry  # importing Hydra takes as long as reading that line
            except KeyboardInterrupt:  # signals are not caught yet
                raise SystemExit(ExitCode.INTERRUPTED) from None

            Entry(main).run(config_path, config_name)

        return run

    return decorate


def _name_script() -> None:
    """Let `python -m train` be `python train.py`, in what is started again and in the commands that a run prints."""
    at = len(sys.orig_argv) - len(sys.argv)
    if at > 1 and sys.orig_argv[at - 1] == "-m":
        sys.argv[0] = os.path.relpath(sys.argv[0])
        sys.orig_argv[at - 1 : at + 1] = [sys.argv[0]]


def _fix_hashes() -> None:
    """Start this process again with Python's hashes of text fixed, unless PYTHONHASHSEED is set.

    They are random in each process, and so is the order of a set of names, from which data code numbers its classes:
    ranks would train on different labels, and a resumed run on others than before. Python reads the variable only when
    it starts. A script that something else runs, as a notebook, a profiler or a debugger, goes on as it is.
    """
    before, own = sys.orig_argv[: -len(sys.argv)], sys.orig_argv[-len(sys.argv) :]
    is_plain = all(word.startswith("-") or flag in ("-X", "-W") for flag, word in pairwise(before))
    is_set = "PYTHONHASHSEED" in os.environ or sys.flags.ignore_environment
    if is_plain and own == sys.argv and not is_set and not _asks(sys.argv[1:]):
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _defer_torchmetrics() -> None:
    """Let torchmetrics import all of its metrics only in a run that uses one of them.

    Lightning imports the package for its base classes, and the package imports SciPy, transformers and torchvision with
    its metrics where they are installed: half of the time from the start to the first step.
    """
    spec = find_spec("torchmetrics")
    if spec is None or spec.loader is None or "torchmetrics" in sys.modules:
        return
    package: Any = module_from_spec(spec)
    load = spec.loader.exec_module

    def attribute(name: str) -> Any:
        if name == "_logger":  # its modules import it
            return import_module("logging").getLogger("torchmetrics")
        if name.startswith("__") and name not in ("__version__", "__all__"):
            raise AttributeError(name)
        import_module("torchmetrics.utilities")  # first, as in the package itself: they import each other
        for light in map(import_module, (f"torchmetrics.{part}" for part in _LIGHT)):
            if name != "__all__" and hasattr(light, name):
                return getattr(light, name)
        del package.__getattr__
        load(package)
        return getattr(package, name)

    package.__getattr__ = attribute
    sys.modules["torchmetrics"] = package
    _defer_matplotlib(*package.__path__)


def _defer_matplotlib(folder: str) -> None:
    """Let torchmetrics import matplotlib only when a metric is plotted: its base class would, where it is installed."""
    spec = spec_from_file_location("torchmetrics.utilities.plot", os.path.join(folder, "utilities", "plot.py"))
    if spec is None or spec.loader is None or not os.path.exists(spec.origin or ""):
        return
    plots: Any = module_from_spec(spec)
    load = spec.loader.exec_module

    def attribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith("_TYPE"):  # of an argument, as if matplotlib were not installed
            return object

        def plotted(*args: Any, **options: Any) -> Any:
            if vars(plots).pop("__getattr__", None) is not None:
                load(plots)
            return getattr(plots, name)(*args, **options)

        return plotted

    plots.__getattr__ = attribute
    sys.modules[spec.name] = plots


def show_first_line(arguments: Sequence[str]) -> None:
    """Print a line if stdout is a terminal, where someone may be waiting: the imports take seconds.

    Ranks other than 0 print nothing. Neither do `--help` and similar options, which respond as fast.

    Args:
        arguments: `sys.argv[1:]`.
    """
    is_first = all(os.environ.get(name, "0") == "0" for name in _RANKS)
    if sys.stdout.isatty() and is_first and not _asks(arguments):
        print(f"process    {os.getpid()} on {os.uname().nodename} reads the config, then imports torch", flush=True)


def _asks(arguments: Sequence[str]) -> bool:
    return not _QUESTIONS.isdisjoint(word.partition("=")[0] for word in arguments)
