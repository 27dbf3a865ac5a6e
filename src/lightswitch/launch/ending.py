"""The end of a run in this process, finished or failed: what is printed, and the exit code."""

from __future__ import annotations

import sys
from typing import NoReturn

from omegaconf import DictConfig

from lightswitch.config.confidential import Cleaner
from lightswitch.context import RunContext
from lightswitch.errors import ExitCode, Failure, RanksFailed, ToldElsewhere
from lightswitch.failures import classify, crash_report
from lightswitch.failures.classify import full_traceback, one_line
from lightswitch.failures.crash_report import CrashReport, print_once
from lightswitch.process.state import Process


def exit_with(problems: list[str]) -> NoReturn:
    """Print problems that the user can fix, once for all processes of a launcher, and exit with code 2."""
    print_once("\n".join(f"error: {problem}" for problem in problems))
    raise SystemExit(ExitCode.REFUSED)


def leave_watchdog(process: Process) -> None:
    """Wait for all ranks, if there is a watchdog, and end it: the run is done."""
    if process.is_watched.is_set():
        _finish_uploads()
    process.leave_watchdog()


def _finish_uploads() -> None:
    """Finish wandb's upload now: once other ranks have ended, srun leaves this one only a few seconds."""
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.finish()


def is_known(process: Process) -> bool:
    """Return whether the ranks have agreed on the first failure."""
    return process.watchdog is not None and process.has_failed.is_set()


def answer(error: BaseException, cfg: DictConfig, run: RunContext) -> int | None:
    """Report an error to the user, and return the exit code.

    None for a bug in a run of one process: Python prints its traceback.
    """
    if isinstance(error, ToldElsewhere):
        run.process.note_failure(f"error: {error}")
        return ExitCode.REFUSED
    has_begun = run.process.steps_have_begun.is_set()
    if (member := run.process.watchdog) is not None:
        from lightswitch.failures.watchdog import Member  # slow to import, and imported by now

        assert isinstance(member, Member)
        first = member.verdict or member.fail(classify.failure(error, cfg, member.rank, has_begun))
        return first.exit_code
    report = CrashReport(run)
    if isinstance(error, RanksFailed):
        return error.failure.exit_code if error.is_told or report.is_printed else _tell(error.failure, report)
    rank = classify.rank_of(cfg, run.placement)
    first = classify.failure(error, cfg, rank, has_begun)
    if first.exit_code == ExitCode.REFUSED or rank.world_size != 1:
        return _tell(first, report)
    run.process.note_failure(one_line(error))
    crash_report.add_report(error, first, rank, "outside of the Trainer", report)
    report.log(first.details)
    return None


def _tell(first: Failure, report: CrashReport) -> int:
    if first.exit_code == ExitCode.REFUSED:
        report.run.process.note_failure(first.line)
        if print_once(first.line):
            report.log_details(first.details)
        return ExitCode.REFUSED
    crash_report.write_for_torchrun(first)
    return report.print_failure(first)


def log(error: BaseException, cfg: DictConfig, run: RunContext) -> None:
    """Write an error to the run's log only."""
    CrashReport(run).log(Cleaner.of(cfg).cleaned(full_traceback(error)))
