"""How a run ends in this process, whether it is done, was stopped or has failed: what is told, and the exit code."""

from __future__ import annotations

import sys
from typing import NoReturn

from omegaconf import DictConfig

from lightswitch.config.confidential import Cleaner
from lightswitch.context import RunContext
from lightswitch.errors import ExitCode, Failure, RanksFailed, ToldElsewhere
from lightswitch.fault_tolerance import classify, crash_report, telling
from lightswitch.fault_tolerance.crash_report import CrashReport
from lightswitch.fault_tolerance.failure import full_traceback, one_line
from lightswitch.process.state import Process


def exit_with(problems: list[str]) -> NoReturn:
    """Print what the user can mend, once for all processes of a launcher, and exit."""
    telling.print_once("\n".join(f"error: {problem}" for problem in problems))
    raise SystemExit(ExitCode.REFUSED)


def leave_watchdog(process: Process) -> None:
    """Wait for all ranks, where they watch one another, and end that: the run is done."""
    if process.is_watched.is_set():
        _finish_uploads()
    process.leave_watchdog()


def _finish_uploads() -> None:
    """While the others wait: when they have ended, srun gives this rank a few seconds more, and not at its exit."""
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.finish()


def is_known(process: Process) -> bool:
    """Whether the ranks have agreed on what failed first."""
    return process.watchdog is not None and process.has_failed.is_set()


def answer(error: BaseException, cfg: DictConfig, run: RunContext) -> int | None:
    """Tell the user of an error, and return the exit code.

    None for a bug in a run of one process: Python prints its traceback.
    """
    if isinstance(error, ToldElsewhere):
        run.process.note_failure(f"error: {error}")
        return ExitCode.REFUSED
    has_begun = run.process.steps_have_begun.is_set()
    if (member := run.process.watchdog) is not None:
        from lightswitch.fault_tolerance.watchdog.member import Member  # takes a while to import, and is by now

        assert isinstance(member, Member)
        first = member.verdict or member.fail(classify.failure(error, cfg, member.rank, has_begun))
        return first.exit_code
    report = CrashReport(run)
    if isinstance(error, RanksFailed):
        return error.failure.exit_code if error.is_told or report.is_told else _tell(error.failure, report)
    rank = classify.rank_of(cfg, run.placement)
    first = classify.failure(error, cfg, rank, has_begun)
    if first.exit_code == ExitCode.REFUSED or rank.world_size != 1:
        return _tell(first, report)
    run.process.note_failure(one_line(error))
    classify.add_report(error, first, rank, "outside of the Trainer", report)
    report.log(first.details)
    return None


def _tell(first: Failure, report: CrashReport) -> int:
    if first.exit_code == ExitCode.REFUSED:
        report.run.process.note_failure(first.line)
        if telling.print_once(first.line):
            report.log_details(first.details)
        return ExitCode.REFUSED
    crash_report.write_for_torchrun(first)
    return report.print_failure(first)


def log(error: BaseException, cfg: DictConfig, run: RunContext) -> None:
    """Write it to the run's log alone."""
    CrashReport(run).log(Cleaner.of(cfg).cleaned(full_traceback(error)))
