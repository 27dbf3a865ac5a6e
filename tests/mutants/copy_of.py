"""A copy of the checkout, in which one mutant at a time is tried."""

from __future__ import annotations

import contextlib
import importlib
import math
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import traceback
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

from tests.mutants.mutants import CHECKOUT, Mutant, code_of, mutation

# seconds, which a process that is forked for each mutant need not take again; none of ours, as that is what differs
PRELOADED = ("hydra", "lightning.pytorch", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torchmetrics")
OURS = ("benchmarks", "lightswitch", "project", "tests")
_PATIENCE_SECONDS = 60  # for pytest to end what its tests have started


@dataclass(frozen=True)
class Outcome:
    failed: tuple[str, ...]  # tests
    seconds: float
    is_whole: bool = True  # no limit of time has ended it
    output: str = ""


class Copy:
    """A clone of the checkout with what is not committed, and a Python that finds its code."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for module in PRELOADED:
            importlib.import_module(module)
        subprocess.run(["git", "clone", "--quiet", "--shared", "--no-checkout", str(CHECKOUT), str(folder)], check=True)
        listed = ["git", "-C", str(CHECKOUT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for path in filter(None, subprocess.check_output(listed, text=True).split("\0")):
            if (CHECKOUT / path).is_file():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(CHECKOUT / path, folder / path, follow_symlinks=False)
        subprocess.run(["git", "-C", str(folder), "reset", "--quiet"], check=True, stdout=subprocess.DEVNULL)
        venv.EnvBuilder(symlinks=True).create(folder / ".venv")
        (site,) = folder.glob(".venv/lib/python*/site-packages")
        self.python = folder / ".venv/bin/python"
        # on the path, the packages' own .pth files are not read, one of which leads to the checkout
        (site / "copy.pth").write_text(f"{folder / 'src'}\n{sysconfig.get_path('purelib')}\n")

    @contextlib.contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[Path]:
        """Put a mutant in, and out again; yield the path of its file."""
        change = mutation(mutant, code_of(self.folder))
        path = self.folder / change.path
        before = path.read_text()
        path.write_text(change.text)
        try:
            yield change.path
        finally:
            path.write_text(before)

    def run(self, *tests: str, options: str = "", limit_seconds: float = math.inf) -> Outcome:
        """Run tests."""
        plugins = ("-p", "no:cacheprovider")
        known = ("-W", "ignore:Module already imported")  # plugins, by what is preloaded
        arguments = ["-q", "-rfE", "--tb=short", *plugins, *known, *shlex.split(options), *tests]
        begin, log = time.monotonic(), self.folder.with_name("log")
        if (pid := os.fork()) == 0:
            self._run_here(arguments, log)
        code, is_whole = _waited(pid, limit_seconds)
        output = log.read_text(errors="replace")
        failed = re.findall(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", output, re.MULTILINE)
        fine = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
        if is_whole and not failed and code not in fine:
            raise RuntimeError(f"pytest ended with {code}:\n{output}")
        return Outcome(tuple(failed), time.monotonic() - begin, is_whole)

    def _run_here(self, arguments: list[str], log: Path) -> NoReturn:
        """Run pytest in this process, which was forked for it, as if the copy's Python had been started there."""
        code: int = pytest.ExitCode.INTERNAL_ERROR
        try:
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for stream, path, flags in ((0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)):
                os.dup2(os.open(path, flags, 0o600), stream)
            os.dup2(1, 2)
            os.chdir(self.folder)
            programs = f"{self.python.parent}{os.pathsep}{Path(sys.executable).parent}"
            os.environ["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # a file may be put back within the clock's resolution
            sys.dont_write_bytecode = True
            for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
                del sys.modules[name]
            others = (path for path in sys.path if path not in ("", str(CHECKOUT), str(CHECKOUT / "src")))
            sys.modules["__main__"] = importlib.import_module("pytest.__main__")  # `if __name__` is not met
            sys.path[:] = [str(self.folder), str(self.folder / "src"), *others]
            sys.executable = str(self.python)
            multiprocessing.set_executable(sys.executable)
            code = pytest.main(arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)


def _waited(pid: int, limit_seconds: float) -> tuple[int, bool]:
    """Return a process's exit code once it has ended, and whether no limit has ended it; nothing of it is left."""
    end = time.monotonic() + limit_seconds
    interrupted = False
    try:
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL if interrupted else signal.SIGINT)
                interrupted, end = True, time.monotonic() + _PATIENCE_SECONDS
            time.sleep(0.1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(ended[1]), not interrupted
