"""Runs that measure a way to train. Each rank is forked from a server that has imported torch already."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import re
import runpy
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from lightswitch.checking import probe
from lightswitch.checking.comparison import States, states
from lightswitch.cluster.environments import reserve_port
from lightswitch.errors import ExitCode, Refused
from lightswitch.process import ended_by

EQUAL = "equal"  # value of `Measured.exported` for a correct export
T = TypeVar("T")

TIMEOUT_SECONDS = 1800.0  # of one run
_SETTLE_SECONDS = 15.0  # that the other ranks get to end, once one has failed
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Way:
    """Way to train: a strategy on a number of devices.

    Attributes:
        words: overrides that select it.
    """

    name: str
    words: tuple[str, ...]
    ranks: int


@dataclass(frozen=True)
class Measured:
    """Runs of a way, and their results.

    Attributes:
        whole: run from start to end.
        killed: the same run, whose ranks kill themselves.
        resumed: run in the same way from the killed run's checkpoint; None if there is no checkpoint.
        elsewhere: run in one process from the same checkpoint; None if there is none, or the way is one process.
        exported: "equal" if the export of the last checkpoint loads with equal weights, else the problem.
    """

    way: Way
    whole: Ended
    killed: Ended | None = None
    resumed: Ended | None = None
    elsewhere: Ended | None = None
    exported: str = EQUAL

    @cached_property
    def states(self) -> Mapping[str, States]:
        """States of the way's runs, by the run's name."""
        runs = {"whole": self.whole, "killed": self.killed, "resumed": self.resumed, "elsewhere": self.elsewhere}
        return {name: states(run.moments) for name, run in runs.items() if run is not None}

    @property
    def is_trained(self) -> bool:
        return self.whole.code == 0 and bool(self.states["whole"])


def exports(run_dir: Path) -> str:
    """Export a run's last checkpoint and load it; return the problem in one line, or EQUAL."""
    from lightswitch.checkpoints import names, weight_files
    from lightswitch.checkpoints.weight_files import Weights
    from lightswitch.export.models import load, model_config

    checkpoint = run_dir / "checkpoints" / "last.ckpt"
    if not checkpoint.exists():
        return "there is no checkpoint"
    try:
        weights = Weights(checkpoint)
        file = run_dir / ("exported.pt" if weights.extra_state else "exported.safetensors")
        node = model_config(checkpoint, trust=True).node
        weight_files.write(weights, node, file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = load(file, trust=True)
        found = names.state_of(model)
        saved = weights.read(weights.like)
        for name, tensor in saved.items():
            if name not in found or not weight_files.same_bits(found[name].contiguous(), tensor):
                return f"{name} differs from the saved value"
    except Refused as refusal:
        return str(refusal)
    except Exception as error:  # the module's constructor may raise any exception
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return EQUAL


@dataclass(frozen=True)
class Ended:
    """Result of a run that has ended.

    Attributes:
        code: exit code of the first rank that failed, else 0; negative for a signal.
        moments: moments that the probe has recorded.
        output: stdout and stderr of all ranks.
        run_dir: its run directory.
    """

    code: int
    moments: list[dict[str, Any]]
    output: str
    run_dir: Path

    @property
    def is_refused(self) -> bool:
        return self.code == ExitCode.REFUSED

    @property
    def problem(self) -> str:
        """Line that says why the run failed."""
        if refused := re.findall(r"^error: (.*)$", self.output, re.MULTILINE):
            return str(refused[0])
        if failed := re.findall(r"^rank \d+(?: of \d+)? on \S+ failed: (.*)$", self.output, re.MULTILINE):
            return str(failed[0])
        lines = [line for line in self.output.splitlines() if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
        return lines[-1] if lines else f"it {ended_by(self.code)}"

    @property
    def traceback(self) -> str:
        """Output from the first traceback on; empty if there is none."""
        found = re.search(r"^Traceback \(most recent call last\):\n(?:.*\n)*", self.output, re.MULTILINE)
        return found[0].rstrip() if found else ""


class Starter:
    """Starter of a script's runs, one after the other, and of functions, in processes forked from a server.

    Args:
        script: path of the script, such as train.py.
        preloaded: modules that the server imports if they exist.
        environment: environment variables in addition to this process's.
    """

    def __init__(self, script: Path, preloaded: Sequence[str], environment: Mapping[str, str]) -> None:
        self._script = script
        self._environment = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
        self._environment |= environment
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preloaded))
        self.count = 0

    def run(self, folder: Path, arguments: Sequence[str], ranks: int) -> Ended:
        """Start ranks as torchrun would, or a single process; wait until they have ended, and return the result.

        Args:
            folder: folder for outputs and moments, which is created here; it also holds the run directory.
        """
        folder.mkdir(parents=True)
        self.count += 1
        run_dir = folder / "run"
        words = (*arguments, f"hydra.run.dir='{run_dir}'")
        outputs = [folder / f"rank_{rank}.txt" for rank in range(ranks)]
        with reserve_port() as held:
            environments = _as_torchrun(ranks, self.count, held.getsockname()[1]) if ranks > 1 else [{}]
            every = [{**self._environment, **own} for own in environments]
            processes = [
                self._context.Process(target=_train, args=(self._script, words, path, environment, ranks))
                for path, environment in zip(outputs, every, strict=True)
            ]
            code = _ended(processes)
        output = "".join(path.read_text(errors="replace") for path in outputs if path.exists())
        return Ended(code, probe.read(folder), output, run_dir)

    def call(self, function: Callable[..., T], *arguments: Any) -> T | None:
        """Return the result of a function in a separate process; None if that process ends without a result."""
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_answer, args=(theirs, self._environment, function, arguments))
        process.start()
        theirs.close()
        try:
            found: T = ours.recv()
            return found
        except EOFError:
            return None
        finally:
            process.join()


def _ended(processes: Sequence[multiprocessing.process.BaseProcess]) -> int:
    """Start processes, wait for all of them, and return the first exit code that is not 0, else 0.

    If a process fails, kill those that have not ended after `_SETTLE_SECONDS`: they may be waiting for it. Kill all
    after `TIMEOUT_SECONDS`.
    """
    for process in processes:
        process.start()
    end, first = time.monotonic() + TIMEOUT_SECONDS, 0
    try:
        while (alive := [one for one in processes if one.is_alive()]) and time.monotonic() < end:
            multiprocessing.connection.wait([one.sentinel for one in alive], 1)
            codes = [one.exitcode for one in processes if one.exitcode]
            if codes and not first:
                first, end = codes[0], min(end, time.monotonic() + _SETTLE_SECONDS)
    finally:
        for process in processes:
            if process.is_alive() and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):  # it has ended since it was checked
                    os.killpg(process.pid, signal.SIGKILL)
            process.join()
    return first or next((one.exitcode for one in processes if one.exitcode), 0) or 0


def _as_torchrun(ranks: int, count: int, port: int) -> list[dict[str, str]]:
    run_id = f"check_{os.getpid()}_{count}"
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": run_id}
    common |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _train(script: Path, words: Sequence[str], output: Path, environment: dict[str, str], ranks: int) -> None:
    os.setsid()  # so that all processes that it starts can be killed with it
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        stream.flush()
        os.dup2(descriptor, number)
    _become(environment)
    sys.path.insert(0, str(script.parent))  # as Python does for a script
    sys.argv[:] = [str(script), *words]
    sys.orig_argv[:] = [sys.executable, *sys.argv]
    runpy.run_path(str(script), run_name="__main__")


def _become(environment: dict[str, str]) -> None:
    """Make the process behave as if it had been started with an environment."""
    import torch

    multiprocessing.set_start_method(None, force=True)  # the server's method must not apply to the user's data loaders
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ |= environment
    if threads := environment.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))


def _answer(results: Any, environment: dict[str, str], function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    _become(environment)
    results.send(function(*arguments))
