"""Mutants as the files beside this one list them, and a copy of the checkout in which tests are run with one.

A mutant names no file: its text is found wherever the code has moved to, whatever its indentation there.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import textwrap
import time
import venv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[1]


@dataclass(frozen=True)
class Mutant:
    name: str  # package/fault
    breaks: str  # the sentence that no longer holds
    found: str  # code, as it is
    replaced: str  # what stands there in the mutant
    caught_by: tuple[str, ...]  # tests that came with the mend, as pytest names them
    note: str = ""


@dataclass(frozen=True)
class Mutation:
    path: Path  # in the checkout
    text: str  # of the whole file


def listed(*names: str) -> list[Mutant]:
    """Return the mutants of these names or packages, or all."""
    mutants = [_mutant(path.stem, name, of) for path in sorted(HERE.glob("*.yaml")) for name, of in _read(path).items()]
    chosen = [mutant for mutant in mutants if not names or {mutant.name, mutant.name.split("/")[0]} & {*names}]
    if unknown := {*names} - {part for mutant in mutants for part in (mutant.name, mutant.name.split("/")[0])}:
        raise ValueError(f"no mutant and no package is named {', '.join(sorted(unknown))}: see tests/mutants/*.yaml")
    return chosen


CODE = ("train.py", "src/**/*.py", "slurm/*.sh", "conf/**/*.yaml", "Makefile", "docs/*.md", "benchmarks/*.py")
CODE += ("docs/examples/cloud/*.yaml", "tests/pool.py", "tests/mutants/mutants.py", "tests/engine/gpu/__main__.py")


def code_of(checkout: Path = CHECKOUT) -> dict[Path, str]:
    """Return the texts that mutants change, by path in the checkout: code, config, pages, and the tools of tests."""
    paths = (path for pattern in CODE for path in sorted(checkout.glob(pattern)))
    return {path.relative_to(checkout): path.read_text() for path in paths}


def mutation(mutant: Mutant, code: Mapping[Path, str]) -> Mutation:
    """Return the file that a mutant changes, as it is with it.

    Raises:
        ValueError: its text is not found exactly once in the code.
    """
    lines = [re.escape(line.strip()) for line in mutant.found.strip().splitlines()]
    pattern = re.compile(r"[ \t]*\n[ \t]*".join(lines))
    first = mutant.found.strip().splitlines()[0].strip()
    texts = {path: text for path, text in code.items() if first in text}  # by far faster than the pattern
    places = [(path, match) for path, text in texts.items() for match in pattern.finditer(text)]
    if len(places) != 1:
        where = ", ".join(str(path) for path, _ in places) or "no file"
        raise ValueError(
            f"{mutant.name}: what it calls `found` stands in {where}, and should once; where the code has changed, "
            "write the fault as it would be there today; where it can't happen any more, remove the mutant"
        )
    ((path, match),) = places
    text = code[path]
    begin = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
    indentation = begin[: len(begin) - len(begin.lstrip())]
    replaced = textwrap.indent(textwrap.dedent(mutant.replaced).strip("\n"), indentation)[len(indentation) :]
    return Mutation(path, text[: match.start()] + replaced + text[match.end() :])


def _read(path: Path) -> dict[str, dict[str, object]]:
    return yaml.safe_load(path.read_text()) or {}


def _mutant(package: str, name: str, of: dict[str, object]) -> Mutant:
    caught_by = of.pop("caught_by")
    tests = tuple([caught_by] if isinstance(caught_by, str) else map(str, caught_by))  # type: ignore[call-overload]
    return Mutant(f"{package}/{name}", caught_by=tests, **{key: str(value) for key, value in of.items()})


_PATIENCE_SECONDS = 60  # for pytest to end what its tests have started


@dataclass(frozen=True)
class Outcome:
    failed: tuple[str, ...]  # tests
    seconds: float
    is_whole: bool  # no limit of time has ended it


class Copy:
    """A clone of the checkout with what is not committed, and a Python that finds its code."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
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

    def run(self, *tests: str, options: str = "", limit_seconds: float | None = None) -> Outcome:
        """Run tests by the copy's Python; what they have started is ended with them."""
        arguments = ["-q", "-rfE", "--tb=short", "-p", "no:cacheprovider", *shlex.split(options), *tests]
        programs = f"{self.python.parent}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        # no bytecode: a file may be put back within the clock's resolution
        environ = {**os.environ, "PATH": programs, "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
        begin, log, is_whole = time.monotonic(), self.folder.with_name("log"), True
        command = [str(self.python), "-m", "pytest", *arguments]
        streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "start_new_session": True}
        with log.open("w") as out, subprocess.Popen(command, cwd=self.folder, env=environ, stdout=out, **streams) as it:
            try:
                it.wait(limit_seconds)
            except subprocess.TimeoutExpired:
                is_whole = False
                it.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    it.wait(_PATIENCE_SECONDS)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(it.pid, signal.SIGKILL)
        output = log.read_text(errors="replace")
        failed = re.findall(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", output, re.MULTILINE)
        fine = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
        if is_whole and not failed and it.returncode not in fine:
            raise RuntimeError(f"pytest ended with {it.returncode}:\n{output}")
        return Outcome(tuple(failed), time.monotonic() - begin, is_whole)
