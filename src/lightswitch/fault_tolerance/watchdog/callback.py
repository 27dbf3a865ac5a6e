"""The callback that joins a rank to the watchdog, counts its progress, and reports its error."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from omegaconf import DictConfig

from lightswitch.batches.callback import GlobalBatch
from lightswitch.checkpoints.portable import PortableCheckpoints
from lightswitch.context import RunContext
from lightswitch.errors import Ended, ExitCode, Failure, RanksFailed, Stopped
from lightswitch.fault_tolerance import classify, crash_report, loader_workers
from lightswitch.fault_tolerance.crash_report import CrashReport
from lightswitch.fault_tolerance.failure import Rank, node_name
from lightswitch.fault_tolerance.stacks import oom_kills
from lightswitch.fault_tolerance.watchdog import sockets
from lightswitch.fault_tolerance.watchdog.member import Member
from lightswitch.fault_tolerance.watchdog.sockets import Route
from lightswitch.fault_tolerance.watchdog.verdict import Timeouts
from lightswitch.process.signals import stopped_with
from lightswitch.runs import starts

log = logging.getLogger(__name__)

_REACH_SECONDS = 10.0


class Watchdog(Callback):
    """Join the watchdog once ranks form a group, count the batches begun, and report an error before the teardown.

    A run of one process has no watchdog, only a crash report.

    Args:
        advise: returns what to try next where memory has run out.
    """

    def __init__(
        self,
        cfg: DictConfig,
        run: RunContext,
        batch: GlobalBatch,
        timeouts: Timeouts,
        advise: Callable[[Trainer], str],
    ) -> None:
        self.cfg = cfg
        self.run = run
        self.report = CrashReport(run)
        self.batch = batch
        self.timeouts = timeouts
        self.advise = advise
        self._own: Failure | None = None
        self._oom_kills = oom_kills()
        self._trainer: Trainer

    def join(self, trainer: Trainer) -> None:
        """Connect this rank to the hub. Collective: once the group exists, before the user's code runs in it."""
        self._trainer = trainer
        if self._member is not None:
            return
        rank = Rank(trainer.global_rank, trainer.world_size, node_name(), os.getpid())
        member = Member(rank, self.timeouts, self.run.process, self._answer)
        strategy: Any = trainer.strategy
        environment = strategy.cluster_environment
        self.run.process.hosts[:], routes = _hosts_and_routes(trainer, environment.main_address, environment.main_port)
        at = (rank, *member.open_hub(routes), self.report.folder) if trainer.is_global_zero else None
        first, address, port, token, self.run.process.crash_folder = strategy.broadcast(at)
        try:
            member.join(first, address or environment.main_address, port, token)
        except (OSError, TimeoutError) as error:
            log.warning("%s can't reach the watchdog in rank 0, and runs without it: %s", rank, error)
            return
        self.run.process.join_watchdog(member)
        if isinstance(strategy, PortableCheckpoints):
            strategy.ranks_hear_of_failures = True

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._moved()  # preparing the data may have taken long

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Stopped) and self.run.signals.is_deferred:  # the ranks have agreed on it
            self.run.process.leave_watchdog()
        elif isinstance(exception, Stopped):
            self.run.process.stop_all_ranks(exception)
        elif self._member is not None and not isinstance(exception, Ended):
            self.failure(exception, trainer)
        elif trainer.world_size == 1 and not isinstance(exception, RanksFailed):
            self._report(exception, trainer)  # launch/ending does the rest, and Python prints the traceback

    def failure(self, error: BaseException, trainer: Trainer) -> Failure:
        """Report this rank's error to the others, and return the first failure of the run, which may be another's."""
        member = self._member
        if member is None:
            return self._report(error, trainer)
        self._own = self._failure(error, member.rank)
        return member.fail(self._own)

    @property
    def _member(self) -> Member | None:
        watchdog = self.run.process.watchdog
        return watchdog if isinstance(watchdog, Member) else None

    def _report(self, error: BaseException, trainer: Trainer) -> Failure:
        """Write the crash report of a rank that is alone, or not connected to the others."""
        rank = Rank(trainer.global_rank, trainer.world_size, node_name(), os.getpid())
        own = self._failure(error, rank)
        if own.lacks_memory:
            own = replace(own, line=f"{own.line}\n{self.advise(trainer)}")
        if own.exit_code == ExitCode.FAILED:
            self._note_reached(trainer)
            classify.add_report(error, own, rank, self.batch.describe_position(trainer), self.report)
        return own

    def _note_reached(self, trainer: Trainer) -> None:
        if trainer.training:
            starts.note_reached(self.run.run_dir, trainer.global_step)

    def _failure(self, error: BaseException, rank: Rank) -> Failure:
        own = classify.failure(error, self.cfg, rank, self.run.process.steps_have_begun.is_set())
        if own.exit_code == ExitCode.FAILED and loader_workers.was_killed(error) and oom_kills() > self._oom_kills:
            return replace(own, line=f"{own.line}; {rank.node} ran out of memory")
        return own

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher) and not trainer.interrupted:
            self.run.process.leave_watchdog()  # this process ends with the stage

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
        if not self.run.process.steps_have_begun.is_set():  # `set` wakes who waits, and takes a lock for that
            self.run.process.steps_have_begun.set()
        self._moved()

    def _moved(self) -> None:
        if (member := self._member) is not None:
            member.progress += 1

    def _answer(self, failure: Failure) -> None:
        member = self._member
        assert member is not None
        crash_report.write_for_torchrun(failure)
        if failure.exit_code == ExitCode.FAILED:
            self._note_reached(self._trainer)
            advice = f"{self.advise(self._trainer)}\n" if failure.lacks_memory else ""
            self.report.print_failure(replace(failure, details=advice + failure.details))
            self.report.add_rank(member.rank, self.batch.describe_position(self._trainer), self._own)
        elif failure.rank == member.rank.number and not (self.run.is_first and stopped_with(failure.exit_code)):
            self.run.process.note_failure(failure.line)
            print(failure.line, file=sys.stderr, flush=True)
            self.report.log_details(failure.details)


def _hosts_and_routes(trainer: Trainer, address: str, port: int) -> tuple[list[str], list[Route | None]]:
    """Return the machine of every rank, and the route from every rank but the first to that one. Collective."""
    of_ranks: list[Any] = [None] * trainer.world_size
    own = None if trainer.is_global_zero else sockets.route_to(address, port, _REACH_SECONDS)
    torch.distributed.all_gather_object(of_ranks, (node_name(), own))
    return [host for host, _ in of_ranks], [route for _, route in of_ranks[1:]]
