"""The end of a run in one process: its last words and exit code, the ranks that it started, and Slurm's requeue."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from signal import SIGTERM
from typing import NoReturn

from omegaconf import DictConfig

from lightswitch.context import RunContext
from lightswitch.errors import ExitCode, ReportedElsewhere, Stopped
from lightswitch.failures import classify, crash_report
from lightswitch.failures.classify import full_traceback, one_line
from lightswitch.failures.crash_report import CrashReport, print_once
from lightswitch.launch import commands
from lightswitch.process import REQUEUED, Process, ignore_signals, stopped_with
from lightswitch.runs import claim
from lightswitch.runs.claim import slurm_job

log = logging.getLogger(__name__)


def finish(process: Process) -> None:
    """End a run that has succeeded, once all its ranks have."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        leave_stdout()
    wandb = sys.modules.get("wandb")
    if process.is_watched.is_set() and wandb is not None and wandb.run is not None:
        wandb.finish()  # once other ranks have ended, srun ends this one after a few seconds
    process.leave_watchdog()
    process.wait_for_ranks()  # or the next command of a script would find their GPUs in use


def leave_stdout() -> None:
    """Redirect stdout to /dev/null: Python still flushes it at exit, but its reader has closed the pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def refuse(problems: list[str]) -> NoReturn:
    """Print problems that the user can fix, once for all processes of a launcher, and exit with code 2."""
    print_once("\n".join(f"error: {problem}" for problem in problems))
    raise SystemExit(ExitCode.REFUSED)


def answer(error: BaseException, cfg: DictConfig, run: RunContext) -> NoReturn:
    """End a run for an error: report it, end the ranks that this process started, and exit."""
    process, has_failed = run.process, run.process.watchdog is not None and run.process.has_failed.is_set()
    # after a failure that the ranks agreed on, a signal comes from the launcher, which ends the remaining ranks
    stopped = None if has_failed else _stop_cause(run)
    if stopped is not None:
        CrashReport(run).log(full_traceback(error))
        stop(stopped, cfg, run)
    code = _report(error, cfg, run)
    if code != ExitCode.REFUSED and run.is_first and (run.run_dir / "checkpoints").is_dir():
        log.info("go on      %s", commands.repeat(cfg, run.placement))
    if isinstance(error, BrokenPipeError):
        leave_stdout()
    ignore_signals()  # from the launcher, which ends the remaining ranks when one has ended
    process.end_ranks()
    process.locks.close()
    claim.remove_if_empty(run.run_dir)  # Hydra creates it before all checks
    if code is not None:
        raise SystemExit(code) from None
    if isinstance(error, Exception):
        raise error
    raise RuntimeError(f"the run was ended early by {error!r}") from error


def _stop_cause(run: RunContext) -> Stopped | None:
    """Return the signal that caused an error, received by this process or by a rank it started; None without one.

    A deferred signal interrupts nothing, so it causes no error.
    """
    if run.signals.received is not None and not run.signals.is_deferred:
        return Stopped(run.signals.received)
    return next(filter(None, (stopped_with(rank.poll()) for rank in run.process.ranks)), None)


def stop(stopped: Stopped, cfg: DictConfig, run: RunContext) -> NoReturn:
    """End a run that a signal stops, with the command that continues it."""
    run.process.stop_all_ranks(stopped)
    run.process.end_ranks()
    if run.is_first:
        run.signals.note_told()  # the process may take long to end
        log.info("stopped    by %s", stopped.by.name)
        log.info("go on      %s", commands.repeat(cfg, run.placement))
    raise stopped from None


def _report(error: BaseException, cfg: DictConfig, run: RunContext) -> int | None:
    """Report an error to the user, and return the exit code.

    The code is None for a bug in a run of one process, because Python prints its traceback.
    """
    process, report = run.process, CrashReport(run)
    if isinstance(error, ReportedElsewhere):
        process.note_failure(f"error: {error}")
        return ExitCode.REFUSED
    has_begun = process.steps_have_begun.is_set()
    if (member := process.watchdog) is not None:
        from lightswitch.failures.watchdog import Member  # slow to import, but already imported here

        assert isinstance(member, Member)
        agreed = member.verdict or member.fail(classify.failure(error, cfg, member.rank, has_begun))
        return agreed.exit_code
    rank = classify.rank_of(run.placement)
    first = classify.failure(error, cfg, rank, has_begun)
    if first.exit_code == ExitCode.REFUSED:
        process.note_failure(first.line)
        if print_once(first.line, is_alone=not run.placement.is_external):
            report.log_details(first.details)
        return ExitCode.REFUSED
    if rank.world_size != 1:
        return report.print_failure(first)
    process.note_failure(one_line(error))
    crash_report.add_report(error, first, rank, "outside of the Trainer", report)
    report.log(first.details)
    return None


def requeue_after(stopped: Stopped, is_asking: bool, has_trained: bool) -> Stopped:
    """Requeue the job if a notice from Slurm stopped the run, and return the exception with which to exit.

    Notice of a time limit before training has begun is none: the next start would not come further, and it is for the
    job script to count. SIGTERM is such a notice only if Slurm preempts the job; Slurm itself requeues a preempted job
    only if it outlives its grace period. A user who cancels a job also sends SIGTERM, but wants the job to end. Without
    scontrol, for example in a container, the exit code requests the requeue.
    """
    job = slurm_job()
    if job is None:
        return stopped
    is_notice = stopped.by in REQUEUED and has_trained
    if shutil.which("scontrol") is None:
        if is_notice:
            stopped.code = stopped.exit_code = ExitCode.REQUEUE
    elif is_asking and (is_notice or (stopped.by in (SIGTERM, *REQUEUED) and _is_preempted(job))):
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
        if done.returncode:
            log.error("job %s can't be requeued: %s", job, done.stderr.strip())
        else:
            log.info("requeued   job %s", job)
    elif is_asking and stopped.by in REQUEUED:
        log.warning(
            "%s came before a step was trained; if its time limit was near, ask for more --time", stopped.by.name
        )
    return stopped


def _is_preempted(job: str) -> bool:
    shown = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True).stdout
    return re.search(r"\bPreemptTime=\d", shown) is not None
