"""A pool of ranks: processes that live as long as the run of tests, and call functions as ranks of one job.

`pool(2)(function, *arguments)` calls it in two ranks at once, with the environment that torchrun would give them, and
returns what each has returned. A rank has torch and the engine imported, so a call costs about what its function does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import logging
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.runs import CHECKOUT, as_torchrun, context

TIMEOUT_SECONDS = 600.0  # a module that compiles its blocks takes 40 s on a quiet machine
_SETTLE_SECONDS = 3.0  # after the first error, for the other ranks, which may wait for the one that has failed
_PATIENCE_SECONDS = 60.0  # for a rank to say what it has failed of, where another has only lost it; or where it hangs
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


class RankFailed(Exception):
    """A rank's call has raised, or its process has ended or taken too long.

    Attributes:
        rank: of the first that failed.
        error: what it has raised, where that can be pickled; None for a process that ended.
    """

    def __init__(self, rank: int, told: str, error: BaseException | None = None) -> None:
        super().__init__(f"rank {rank}: {told}")
        self.rank, self.error = rank, error


@dataclass
class _Rank:
    """A process of the pool."""

    process: BaseProcess
    connection: Connection
    output: Path  # stdout and stderr of its last call


@dataclass
class Pool:
    """Processes that are started as calls need them; one that has died or hung is replaced by the next call."""

    folder: Path
    _ranks: list[_Rank | None] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __call__(self, ranks: int, timeout_seconds: float = TIMEOUT_SECONDS) -> Callable[..., list[Any]]:
        """Return what calls a function in so many ranks, and returns the list of what they have returned."""
        return partial(self._call, ranks, timeout_seconds)

    def _call(self, world: int, timeout_seconds: float, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Call a function, which has to be picklable, as its arguments and results.

        Raises:
            RankFailed: for the first rank that has failed.
        """
        call = pickle.dumps(partial(function, *args, **named))
        ranks = [self._rank(index) for index in range(world)]
        with as_torchrun(world, f"call_{next(self._numbers)}") as environments:
            for rank, own in zip(ranks, environments, strict=True):
                rank.connection.send((call, {**os.environ, **own}, warnings.filters, timeout_seconds))
            answers, failed = self._answers(ranks, timeout_seconds)
        if failed is not None:
            raise failed
        return [pickle.loads(answers[index]) for index in range(world)]

    def _rank(self, index: int) -> _Rank:
        self._ranks += [None] * (index + 1 - len(self._ranks))
        rank = self._ranks[index]
        if rank is None or not rank.process.is_alive():
            ours, theirs = multiprocessing.Pipe()
            output = self.folder / f"rank_{index}.log"
            process = context.Process(target=_serve, args=(theirs, output))
            process.start()
            theirs.close()
            rank = self._ranks[index] = _Rank(process, ours, output)
        return rank

    def _answers(self, ranks: Sequence[_Rank], timeout_seconds: float) -> tuple[dict[int, bytes], RankFailed | None]:
        answers: dict[int, bytes] = {}
        failed: RankFailed | None = None
        end = time.monotonic() + timeout_seconds + _PATIENCE_SECONDS  # a rank that hangs writes its stack and ends
        left = dict(enumerate(ranks))
        while left and (seconds := end - time.monotonic()) > 0:
            multiprocessing.connection.wait([rank.connection for rank in left.values()], seconds)
            for index in [index for index, rank in left.items() if rank.connection.poll()]:
                rank = left.pop(index)
                try:
                    has_returned, answer, is_spent = rank.connection.recv()
                except (EOFError, ConnectionResetError):
                    failure = RankFailed(index, self._ended(rank))
                else:
                    if is_spent:
                        _kill(rank.process)
                    if has_returned:
                        answers[index] = answer
                        continue
                    told, error = answer
                    failure = RankFailed(index, f"{told}{rank.output.read_text()}", error and pickle.loads(error))
                if failed is None or _has_lost_another(failed):
                    failed = failure
                    end = time.monotonic() + (_PATIENCE_SECONDS if _has_lost_another(failed) else _SETTLE_SECONDS)
        if left and failed is None:
            failed = RankFailed(min(left), f"it has not ended after {timeout_seconds} s")
        for rank in left.values():
            _kill(rank.process)
        return answers, failed

    def _ended(self, rank: _Rank) -> str:
        rank.process.join()
        return f"its process has ended with {rank.process.exitcode}\n{rank.output.read_text()}"

    def close(self) -> None:
        for rank in filter(None, self._ranks):
            _kill(rank.process)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    with TemporaryDirectory(prefix="pool_") as folder:
        made = Pool(Path(folder))
        yield made
        made.close()


def _has_lost_another(failed: RankFailed) -> bool:
    """Whether a rank may have failed only because another has ended, which it heard of first."""
    return "onnection" in str(failed)


def _kill(process: BaseProcess) -> None:
    """End a rank with all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()


# In a rank


def _serve(connection: Connection, output: Path) -> None:
    os.setsid()  # so that it is ended with the processes that a call has started
    multiprocessing.set_start_method("fork", force=True)
    sys.path[:0] = [str(CHECKOUT)]
    stream = os.open(output, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    with contextlib.suppress(EOFError):  # the run of tests is over
        while True:
            call, environment, filters, timeout_seconds = connection.recv()
            os.truncate(stream, 0)
            faulthandler.dump_traceback_later(timeout_seconds, exit=True, file=stream)
            with state_as_before():
                os.environ.clear()
                os.environ.update(environment)
                warnings.filters[:] = filters  # type: ignore[index]  # a list, whatever its stub says
                answer = _answer(call)
            faulthandler.cancel_dump_traceback_later()
            connection.send((*answer, _has_run_deepspeed()))
    os._exit(0)


def _has_run_deepspeed() -> bool:
    """Return whether DeepSpeed has counted parameters for this process, whose numbers ranks compare."""
    comm = sys.modules.get("deepspeed.comm.comm")
    return comm is not None and comm.cdb is not None


def _answer(call: bytes) -> tuple[bool, Any]:
    try:
        return True, pickle.dumps(pickle.loads(call)())
    except BaseException as error:
        told = traceback.format_exc()
        try:
            pickle.loads(pickled := pickle.dumps(error))
        except Exception:  # whatever its constructor wants
            pickled = b""
        return False, (told, pickled)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


@contextlib.contextmanager
def state_as_before() -> Iterator[None]:
    """Leave a process as it was: its environment, random numbers, torch's settings, logs, signals, process groups."""
    environment, folder, paths, typed = dict(os.environ), os.getcwd(), list(sys.path), list(sys.argv)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    undone = [
        partial(torch.set_num_threads, torch.get_num_threads()),
        partial(torch.set_default_dtype, torch.get_default_dtype()),
        partial(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()),
        partial(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled()),
        partial(torch.set_grad_enabled, torch.is_grad_enabled()),
        *(partial(signal.signal, number, signal.getsignal(number)) for number in _SIGNALS),
        *(partial(vars(logger).update, _settings(logger)) for logger in _loggers()),
        *(partial(setattr, owner, "excepthook", owner.excepthook) for owner in (sys, threading)),
    ]
    with warnings.catch_warnings():
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            if "torch._dynamo" in sys.modules:
                torch.compiler.reset()
            for undo in undone:
                undo()
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(folder)
            sys.path[:], sys.argv[:] = paths, typed
            gc.unfreeze()


def _loggers() -> list[logging.Logger]:
    known = (logging.getLogger(name) for name in list(logging.root.manager.loggerDict))
    return [logging.root, *known]


def _settings(logger: logging.Logger) -> dict[str, Any]:
    return {**vars(logger), "handlers": list(logger.handlers), "filters": list(logger.filters)}
