"""How a run ends in this process, whether it is done, was stopped or has failed: what is told, and the exit code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lightswitch.cluster import processes
from lightswitch.config.confidential import Cleaner
from lightswitch.errors import ExitCode, ToldElsewhere
from lightswitch.fault_tolerance import classify, crash_report, telling
from lightswitch.fault_tolerance.crash_report import CrashReport
from lightswitch.fault_tolerance.failure import Failure, RanksFailed, shown


def exit_with(problems: list[str]) -> NoReturn:
    """Print what the user can mend, once for all processes of a launcher, and exit."""
    telling.once("\n".join(f"error: {problem}" for problem in problems))
    raise SystemExit(ExitCode.REFUSED)


def leave_watchdog() -> None:
    """The run is done: wait for all ranks, and end the watch of the ranks over one another."""
    if processes.are_watched.is_set():
        from lightswitch.fault_tolerance.watchdog import callback  # it imports torch, as this process has

        _finish_uploads()
        callback.leave()


def _finish_uploads() -> None:
    """While the others wait: when they have ended, srun gives this rank a few seconds more, and not at its exit."""
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.finish()


def withdraw_from_watchdog() -> None:
    """The run is asked to stop: no rank waits for another."""
    if processes.are_watched.is_set():
        from lightswitch.fault_tolerance.watchdog import callback  # it imports torch, as this process has

        callback.withdraw()


def is_known() -> bool:
    """The ranks have agreed on what failed first."""
    if not processes.are_watched.is_set():
        return False
    from lightswitch.fault_tolerance.watchdog import callback  # it imports torch, as this process has

    return callback.verdict() is not None


def answer(error: BaseException, cfg: DictConfig) -> int | None:
    """The exit code, once the user is told; None for a bug in a run of one process, which keeps its traceback."""
    if isinstance(error, ToldElsewhere):
        return ExitCode.REFUSED
    if processes.are_watched.is_set():
        from lightswitch.fault_tolerance.watchdog import callback  # it imports torch, as this process has

        return callback.answered(error, cfg).exit_code
    report = crash_report.of(Path(HydraConfig.get().runtime.output_dir))
    if isinstance(error, RanksFailed):
        return error.failure.exit_code if error.is_told or report.is_told else _tell(error.failure, report)
    rank = classify.rank_of(cfg)
    first = classify.failure(error, cfg, rank)
    if first.exit_code == ExitCode.REFUSED or rank.world_size != 1:
        return _tell(first, report)
    classify.add_report(error, first, rank, "outside of the Trainer", report)
    report.log(first.details)
    return None


def _tell(first: Failure, report: CrashReport) -> int:
    if first.exit_code == ExitCode.REFUSED:
        if telling.once(first.line):
            report.log_mistake(first.details)
        return ExitCode.REFUSED
    crash_report.to_torchrun(first)
    return report.tell(first)


def log(error: BaseException, cfg: DictConfig) -> None:
    """In the run's log alone."""
    crash_report.of(Path(HydraConfig.get().runtime.output_dir)).log(Cleaner.of(cfg).cleaned(shown(error)))
