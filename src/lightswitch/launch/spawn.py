"""Ranks that Python spawns, as `strategy=ddp_spawn` asks for. The process that spawns them is a launcher, and no rank.

Each rank runs the script under the environment variables that torchrun would set, so nothing else in the engine knows
of this way to start.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightswitch.config.overrides import quoted
from lightswitch.context import RunContext
from lightswitch.errors import Ended, ExitCode
from lightswitch.preflight import devices
from lightswitch.preflight.check import check
from lightswitch.process import CAUGHT, ended_by, heard

_STAGES = ("fit", "validate", "test", "predict")  # the other modes have no ranks
_VERDICT_SECONDS = 5.0  # for the other ranks to end by themselves, and to say why, once one has failed
_GRACE_SECONDS = 30.0  # after SIGTERM: a step, a checkpoint, uploads


def has_run(cfg: DictConfig, run: RunContext) -> bool:
    """Run all ranks of a run that asks to spawn them; return False, at once, for any other run.

    Raises:
        RefusedRequest: preflight refuses the run; no rank has started.
        Ended: the run has failed or was stopped, with the exit code of its ranks.
    """
    spawns = OmegaConf.select(cfg, "trainer.strategy.start_method", default=None) == "spawn"
    if run.placement.is_external or cfg.get("mode") not in _STAGES or not spawns:
        return False
    checked = cfg.copy()  # each rank checks its own, and rank 0 logs the advice
    check(checked, replace(run, placement=replace(run.placement, rank=-1)))
    trainer: Any = OmegaConf.to_container(checked.trainer, resolve=True)
    count = devices.count(trainer)
    if count == 1:
        return False
    if code := _exit_code_of(count, run):
        raise Ended(code)
    return True


def _exit_code_of(count: int, run: RunContext) -> int:
    from torch.multiprocessing.spawn import start_processes  # slow to import

    from lightswitch.cluster.environments import reserve_port

    gc.freeze()  # otherwise Python searches all that is imported once more when this process ends
    os.environ.setdefault("PYTHONHASHSEED", "0")  # as of a script of its own; a debugger or a notebook left it open
    own = [f"run_id={run.run_id}", f"hydra.run.dir={quoted(str(run.run_dir))}", "hydra.output_subdir=null"]
    with reserve_port() as held:
        arguments = (count, held.getsockname()[1], sys.orig_argv, [*sys.argv, *own])
        signal.pthread_sigmask(signal.SIG_BLOCK, CAUGHT)  # the ranks inherit that, and unblock what they handle
        ranks: list[BaseProcess] = start_processes(_rank, arguments, count, join=False).processes  # type: ignore[no-untyped-call]
        signal.set_wakeup_fd(-1)  # else its reader would end this process before its ranks
        for number in heard():
            signal.signal(number, lambda number, _: _forward(number, ranks))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT)
        return _wait(ranks)


def _rank(rank: int, count: int, port: int, typed: list[str], arguments: list[str]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys._xoptions["follows"] = str(os.getppid())  # torch sends SIGINT when that ends, which a background job ignores
    multiprocessing.set_start_method(None, force=True)  # spawn has set its own, by which loader workers would start
    sys.orig_argv[:] = typed  # printed commands repeat what the user typed
    sys.argv[:] = arguments
    runpy.run_path(sys.argv[0], run_name="__main__")


def _forward(number: int, ranks: Sequence[BaseProcess]) -> None:
    """Send a signal on; Ctrl+C as SIGTERM, because the terminal sends it to the ranks as well, and twice means now."""
    for rank in ranks:
        if rank.is_alive():
            os.kill(rank.pid or 0, signal.SIGTERM if number == signal.SIGINT else number)


def _wait(ranks: Sequence[BaseProcess]) -> int:
    """Wait until all ranks have ended, and return the exit code of the first that failed; 0 if none did."""
    running = list(ranks)
    while running and all(not rank.exitcode for rank in ranks):
        connection.wait([rank.sentinel for rank in running])
        running = [rank for rank in running if rank.exitcode is None]
    failed = next((rank for rank in ranks if rank.exitcode), None)
    if failed is None:
        return 0
    code = failed.exitcode or 0
    if code < 0:  # otherwise the rank has printed its error
        of = f"rank {ranks.index(failed)} of {len(ranks)} on {os.uname().nodename}"
        print(f"{of}: process {failed.pid} {ended_by(code)}", file=sys.stderr, flush=True)
    _end(ranks, _VERDICT_SECONDS, BaseProcess.terminate)
    _end(ranks, _GRACE_SECONDS, BaseProcess.kill)
    return code if code > 0 else ExitCode.FAILED


def _end(ranks: Sequence[BaseProcess], patience_seconds: float, by: Callable[[BaseProcess], None]) -> None:
    """Wait for ranks to end, and end those that have not."""
    end = time.monotonic() + patience_seconds
    for rank in ranks:
        rank.join(max(0.0, end - time.monotonic()))
        if rank.is_alive():
            by(rank)
