"""The watch over the ranks of a run, from the time they form a group."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from omegaconf import DictConfig

from lightswitch.batches.callback import GlobalBatch
from lightswitch.checkpoints.portable import PortableCheckpoints
from lightswitch.cluster import processes
from lightswitch.errors import Ended, ExitCode, Stopped
from lightswitch.fault_tolerance import classify, crash_report, loader_workers
from lightswitch.fault_tolerance.crash_report import CrashReport
from lightswitch.fault_tolerance.failure import Failure, Rank, RanksFailed, node_name
from lightswitch.fault_tolerance.stacks import oom_kills
from lightswitch.fault_tolerance.watchdog import sockets
from lightswitch.fault_tolerance.watchdog.member import Member
from lightswitch.fault_tolerance.watchdog.sockets import Way
from lightswitch.fault_tolerance.watchdog.verdict import Limits

log = logging.getLogger(__name__)

_REACH_SECONDS = 10.0

_member: Member | None = None  # a process is one rank of one run


class Watch(Callback):
    """Joins the watch as soon as there is a group, counts the batches begun, and tells of an error before the teardown.

    A run of one process has no watch, but a crash report.
    """

    def __init__(self, cfg: DictConfig, report: CrashReport, batch: GlobalBatch, limits: Limits) -> None:
        self.cfg = cfg
        self.report = report
        self.batch = batch
        self.limits = limits
        self._own: Failure | None = None
        self._oom_kills = oom_kills()
        self._trainer: Trainer

    def join(self, trainer: Trainer) -> None:
        """Once the ranks have formed a group, and before any of the user's code runs in it."""
        global _member
        self._trainer = trainer
        if _member is not None:
            return
        rank = Rank(trainer.global_rank, trainer.world_size, node_name(), os.getpid())
        member = Member(rank, self.limits, self._answer)
        strategy: Any = trainer.strategy
        environment = strategy.cluster_environment
        ways = _ways(trainer, environment.main_address, environment.main_port)
        at = (rank, *member.open_hub(ways), self.report.folder) if trainer.is_global_zero else None
        first, address, port, token, self.report.folder = strategy.broadcast(at)
        try:
            member.join(first, address or environment.main_address, port, token)
        except (OSError, TimeoutError) as error:
            log.warning("%s can't reach the watch over the ranks, and goes without: %s", rank, error)
            return
        _member = member
        processes.are_watched.set()
        if isinstance(strategy, PortableCheckpoints):
            strategy.ranks_hear_of_failures = True

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._moved()  # preparing the data has taken its time

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Stopped):
            leave()
        elif _member is not None and not isinstance(exception, Ended):
            self.failure(exception, trainer)
        elif trainer.world_size == 1 and not isinstance(exception, RanksFailed):
            self._report(exception, trainer)  # the rest is done where Python prints the traceback

    def failure(self, error: BaseException, trainer: Trainer) -> Failure:
        """What failed first in the run, once this rank's own error is told."""
        if _member is None:
            return self._report(error, trainer)
        self._own = self._failure(error, _member.rank)
        return _member.fail(self._own)

    def _report(self, error: BaseException, trainer: Trainer) -> Failure:
        """Of a rank that is alone, or has not met the others."""
        rank = Rank(trainer.global_rank, trainer.world_size, node_name(), os.getpid())
        own = self._failure(error, rank)
        if own.exit_code == ExitCode.FAILED:
            classify.add_report(error, own, rank, self.batch.place(trainer), self.report)
        return own

    def _failure(self, error: BaseException, rank: Rank) -> Failure:
        own = classify.failure(error, self.cfg, rank)
        if own.exit_code == ExitCode.FAILED and loader_workers.was_killed(error) and oom_kills() > self._oom_kills:
            return replace(own, line=f"{own.line}; {rank.node} ran out of memory")
        return own

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher) and not trainer.interrupted:
            leave()  # this process ends with the stage

    def on_train_batch_start(self, *_: Any) -> None:
        self._step()

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.sanity_checking:
            self._moved()
        else:
            self._step()

    def on_test_batch_start(self, *_: Any) -> None:
        self._step()

    def on_predict_batch_start(self, *_: Any) -> None:
        self._step()

    def on_save_checkpoint(self, *_: Any) -> None:
        self._moved()

    def _step(self) -> None:
        processes.steps_have_begun.set()
        self._moved()

    def _moved(self) -> None:
        if _member is not None:
            _member.progress += 1

    def _answer(self, failure: Failure) -> None:
        assert _member is not None
        crash_report.to_torchrun(failure)
        if failure.exit_code == ExitCode.FAILED:
            self.report.tell(failure)
            self.report.add_rank(_member.rank, self.batch.place(self._trainer), self._own)
        elif failure.rank == _member.rank.number:
            print(failure.line, file=sys.stderr, flush=True)
            self.report.log_mistake(failure.details)


def _ways(trainer: Trainer, address: str, port: int) -> list[Way | None]:
    """From every other rank to rank 0."""
    ways: list[Way | None] = [None] * trainer.world_size
    own = None if trainer.is_global_zero else sockets.way_to(address, port, _REACH_SECONDS)
    torch.distributed.all_gather_object(ways, own)
    return ways[1:]


def verdict() -> Failure | None:
    return _member.verdict if _member else None


def answered(error: BaseException, cfg: DictConfig) -> Failure:
    """What failed first in the run, told already."""
    assert _member is not None
    return _member.verdict or _member.fail(classify.failure(error, cfg, _member.rank))


def withdraw() -> None:
    """The run is asked to stop: that ranks end is no failure from now on."""
    global _member
    if _member is not None and _member.verdict is None:
        _member.withdraw()
        _member = None
        processes.are_watched.clear()


def leave() -> None:
    global _member
    if _member is not None:
        _member.leave()
    _member = None
    processes.are_watched.clear()
