"""The start of a run by Hydra, from the command line to a config and its RunContext, and its end in this process."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGTERM
from typing import TYPE_CHECKING, Any, NoReturn

import hydra
import hydra._internal.hydra
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightswitch import patches
from lightswitch.cluster import placement
from lightswitch.cluster.placement import Placement
from lightswitch.config import hydra_versions
from lightswitch.config.confidential import of_the_clock
from lightswitch.config.hydra_errors import NO_YAML, check_flags, problems_of_composition
from lightswitch.config.overrides import ComposesOnce, asks_for_help, key_and_value, normalised, quoted, typed_overrides
from lightswitch.context import RunContext
from lightswitch.errors import Ended, ExitCode, Failure, RefusedRequest, ReportedElsewhere, Stopped
from lightswitch.failures import classify, crash_report
from lightswitch.failures.classify import full_traceback, one_line
from lightswitch.failures.crash_report import CrashReport, print_once
from lightswitch.launch import commands, spawn
from lightswitch.preflight import environment, own_batch
from lightswitch.process import REQUEUED, Process, Signals, ignore_signals, stopped_with
from lightswitch.runs import claim, starts
from lightswitch.runs.claim import new_run_id, slurm_job

if TYPE_CHECKING:
    from lightswitch.sweeps.pool import Pool

log = logging.getLogger(__name__)


Main = Callable[[DictConfig, RunContext], None]


class Entry:
    """The start of a script's main function in one process. A sweep's launcher may send a copy to another machine."""

    def __init__(self, main: Main) -> None:
        self.main = main
        self.process = Process()
        self.signals = Signals(self.process, requeue_after)
        self.is_composed = False
        self.typed: list[str] = []  # the script and its arguments

    def run(self, config_path: str, config_name: str) -> None:
        """Compose the config and call the main function with it, or run each job of a sweep.

        Raises:
            SystemExit: the run was refused, stopped, or has failed.
        """
        # Threads that spin while they wait slow a run on shared cores down tenfold; sleeping threads cost nothing.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # torch would print C++ stacks when rank 0, which serves the store, has ended; the watchdog says so in a line
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        os.environ["HYDRA_FULL_ERROR"] = "1"  # otherwise Hydra prints bugs in its own way, and exits with 1
        self.signals.catch(is_first=False)  # the rank is not known yet
        logging.getLogger("torch").setLevel(logging.WARNING)  # as torch does on import, which may not happen
        gc.disable()  # imports create many objects, and little garbage; launch/build turns it on again
        try:
            self._run_hydra(config_path, config_name)
            ignore_signals()
        except Stopped as stopped:
            ignore_signals()
            raise self.signals.end_by(stopped) from None
        except (HydraException, OmegaConfBaseException, OSError, RefusedRequest, *NO_YAML) as error:
            if self.is_composed:
                raise
            if isinstance(error, BrokenPipeError):  # the reader has closed the pipe, as in `--help | head`
                _leave_stdout()
                return
            exit_with(problems_of_composition(error))
        finally:
            self.process.release_locks()

    def _run_hydra(self, config_path: str, config_name: str) -> None:
        patches.replace(hydra._internal.hydra, "Hydra", type("Hydra", (_Sweeping,), {"process": self.process}))
        environment.check()
        found = placement.detect()
        self.signals.catch(is_first=found.rank == 0)
        register_resolvers(found, self.process)
        if found.launcher == "local" and placement.is_child():
            self.process.follow_parent(is_child=True)
        if found.launcher == "torchrun" or sys._xoptions.get("follows") == str(os.getppid()):
            self.process.follow_parent(is_child=False)
        folder = Path(inspect.getfile(self.main)).parent.resolve() / config_path
        if (about := asks_for_help(sys.argv[1:])) is not None:
            from lightswitch.reference.choices import help_text

            print(help_text(about, Path(sys.argv[0]), folder))
            return
        typed = sys.argv[1:]
        sys.argv[1:] = normalised(typed, found.rank)
        check_flags(sys.argv[1:], typed)
        self.typed = [str(Path(sys.argv[0]).absolute()), *sys.argv[1:]]

        @functools.wraps(self.main)  # so that Hydra finds the script
        def composed(cfg: DictConfig, pool: Pool | None = None) -> float | None:
            return self._run_composed(cfg, pool)

        with hydra_versions.any_target():
            hydra.main(**hydra_versions.VERSION, config_path=str(folder), config_name=config_name)(composed)()

    def _run_composed(self, cfg: DictConfig, pool: Pool | None) -> float | None:
        found = placement.detect()  # a cluster's job runs in another process than the one that submitted it
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            from lightswitch.sweeps import job
            from lightswitch.sweeps.pool import Pool

            gc.enable()
            if pool is not None:
                return job.run(self.typed, cfg, found, pool)
            with Pool() as own:  # in a process that a cluster started
                return job.run(self.typed, cfg, found, own)
        self.is_composed = True
        run = RunContext.of(cfg, HydraConfig.get(), found, self.process, self.signals)
        classify.keep_disk_errors_of_threads(self.process, run.run_dir)
        if cfg.get("mode") == "fit":
            _resume_restarted(cfg, run)
        if found.launcher == "local":  # the ranks that this process starts get its time
            for key in of_the_clock(cfg):
                OmegaConf.update(cfg, key, time := str(OmegaConf.select(cfg, key)))
                self.process.decided.append(f"{key}={quoted(time)}")
        if not OmegaConf.is_missing(run.hydra.job, "num"):
            from lightswitch.sweeps import job

            self.process.failure_file = job.failure_file(run.run_dir, found)
        try:
            if not spawn.has_run(cfg, run):
                self.main(cfg, run)
            run.process.raise_disk_error()  # of a rank other than 0, which does not report the end
            _flush_stdout()
            leave_watchdog(run.process)
            run.process.wait_for_ranks()  # or the next command of a script would find their GPUs in use
        except Stopped as stopped:
            _stop(stopped, cfg, run)
        except Ended:
            ignore_signals()
            run.process.end_ranks()
            raise
        except BaseException as error:  # also a SystemExit raised by the model: the run is not finished
            _answer(error, cfg, run)
        return None


def _resume_restarted(cfg: DictConfig, run: RunContext) -> None:
    """Resume a run that its launcher has started again: its command says where the first start was to begin."""
    typed = [f"{name}={value}" for name in ("ckpt_path", "resume") if (value := cfg.get(name)) not in (None, "auto")]
    job = claim.restarted_job()
    if typed and job is not None and starts.has_saved(run.run_dir, job):
        if run.is_first:
            log.info("restart    of %s, which has begun with %s: it resumes what it has saved since", job, typed[0])
        cfg.ckpt_path, cfg.resume = None, "auto"


class _Sweeping(ComposesOnce):
    """Hydra whose sweeps lightswitch.sweeps runs, as Hydra calls no hook if a sweep ends early."""

    process: Process

    def multirun(
        self,
        config_name: str | None,
        task_function: Any,
        overrides: list[str],
        with_log_configuration: bool = True,
        parsed_overrides: object = None,  # of Hydra 1.4; the jobs are composed from more overrides than these
    ) -> None:
        """Run a sweep, and print its table."""
        from lightswitch.sweeps import multirun

        def walk_jobs(pinned: list[str]) -> None:
            super(_Sweeping, self).multirun(config_name, task_function, pinned, with_log_configuration)

        multirun.run(walk_jobs, self, config_name, overrides, self.process, _beside_one_another)


def _beside_one_another(cfg: DictConfig, folder: Path) -> Iterator[str]:
    """Yield the lines of a dry run or a comparison about all jobs of a sweep."""
    if cfg.get("mode") == "dry_run":
        from lightswitch.planning import scaling
        from lightswitch.sweeps import record

        yield from scaling.of_sweep(folder, lambda run_dir: job.overrides if (job := record.read(run_dir)) else ())
    elif cfg.get("compare"):
        from lightswitch.compare import page

        yield from page.of_sweep(folder)


def _flush_stdout() -> None:
    """Flush stdout at the end of a run, if its reader has not closed the pipe."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _leave_stdout()


def _leave_stdout() -> None:
    """Redirect stdout to /dev/null: Python still flushes it at exit, but its reader has closed the pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _answer(error: BaseException, cfg: DictConfig, run: RunContext) -> NoReturn:
    # after a failure that the ranks agreed on, a signal comes from the launcher, which ends the remaining ranks
    stopped = None if is_known(run.process) else _stop_cause(error, run)
    if stopped is not None:
        log_error(error, run)
        _stop(stopped, cfg, run)
    code = report_failure(error, cfg, run)
    if code != ExitCode.REFUSED and run.is_first and (run.run_dir / "checkpoints").is_dir():
        log.info("go on      %s", commands.repeat(cfg, run.placement))
    if isinstance(error, BrokenPipeError):
        _leave_stdout()
    ignore_signals()  # from the launcher, which ends the remaining ranks when one has ended
    if run.process.meeting is not None:
        run.process.meeting.part()
    run.process.end_ranks()
    run.process.release_locks()
    claim.remove_if_empty(run.run_dir)  # Hydra creates it before all checks
    if code is not None:
        raise SystemExit(code) from None
    if isinstance(error, Exception):
        raise error
    raise RuntimeError(f"the run was ended early by {error!r}") from error


def _stop_cause(error: BaseException, run: RunContext) -> Stopped | None:
    """Return the signal that caused an error, received by this process or by a rank it started; None without one.

    A deferred signal interrupts nothing, so it causes no error.
    """
    if run.signals.received is not None and not run.signals.is_deferred:
        return Stopped(run.signals.received)
    return next(filter(None, (stopped_with(rank.poll()) for rank in run.process.ranks)), None)


def _stop(stopped: Stopped, cfg: DictConfig, run: RunContext) -> NoReturn:
    run.process.stop_all_ranks(stopped)
    run.process.end_ranks()
    if run.is_first:
        run.signals.note_told()  # the process may take long to end
        log.info("stopped    by %s", stopped.by.name)
        log.info("go on      %s", commands.repeat(cfg, run.placement))
    raise stopped from None


def register_resolvers(placement: Placement, process: Process | None = None) -> None:
    """Register OmegaConf resolvers for a process with this placement."""
    resolvers: dict[str, Callable[..., object]] = {
        "new_run_id": _RunId(process or Process()),
        "run_name": _run_name,
        "launched_devices": lambda: placement.devices_per_node or 1,
        "launched_nodes": lambda: placement.nodes,
        "unless": _unless,
        "steps_or_all": _steps_or_all,
        "own_batch": _own_batch,
    }
    for name, resolver in resolvers.items():
        hydra_versions.register_resolver(name, resolver)


class _RunId:
    """The run id of this process, determined once, because a config is resolved several times.

    submitit pickles resolvers, which functions cached by functools don't support.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._found: str | None = None

    def __call__(self, *, _root_: DictConfig) -> str:
        if self._found is None:
            self._found = new_run_id(cfg=_root_, process=self._process)
        return self._found


def _unless(value: object, otherwise: object, *siblings: str, _parent_: DictConfig) -> object:
    """Return a value, or another one if a sibling key is set: `${unless:500,-1,max_epochs}`."""
    return value if all(_parent_.get(name) is None for name in siblings) else otherwise


def _steps_or_all(steps: int, *, _parent_: DictConfig) -> int:
    """Return a number of steps, or the sibling key `max_steps` if it is lower: `${steps_or_all:250}`."""
    max_steps = _parent_.get("max_steps")
    return min(steps, max_steps) if isinstance(max_steps, int) and max_steps > 0 else steps


def _own_batch(otherwise: int, *, _root_: DictConfig) -> int:
    """Return the batch size that the data define, or else the given one: `${own_batch:64}`."""
    found = own_batch.of(_root_)
    return otherwise if found is None else found.size


def _run_name(*, _root_: DictConfig) -> str:
    """Return the choice of model, or the name of its class if the command line named one."""
    hydra = _root_.hydra if "hydra" in _root_ else HydraConfig.get()  # the former while a sweep names its directory
    choice = hydra.runtime.choices.get("model")
    if choice is None and "_target_" not in (_root_.get("model") or {}) and (swept := _swept_classes(hydra)):
        return swept
    if choice is None and "model" not in _root_:
        message = "model: the config has no such key, and the engine reads it; add it to config.yaml"
        raise RefusedRequest([message])
    named = choice or str(_root_.model._target_).rpartition(".")[2].lower()
    return named.replace("/", "_")  # a choice may be in a subfolder


def _swept_classes(hydra: HydraConf) -> str:
    """Return a name for a sweep over `model._target_`, of which its own config has none: `a.CNN,b.MLP` is cnn-mlp."""
    targets = [value for key, value in map(key_and_value, typed_overrides(hydra)) if key == "model._target_"]
    names = re.findall(r"(\w+)\s*(?:,|$)", targets[-1].lower()) if targets else []
    return "-".join(dict.fromkeys(names))


def exit_with(problems: list[str]) -> NoReturn:
    """Print problems that the user can fix, once for all processes of a launcher, and exit with code 2."""
    print_once("\n".join(f"error: {problem}" for problem in problems))
    raise SystemExit(ExitCode.REFUSED)


def leave_watchdog(process: Process) -> None:
    """Wait for all ranks, if there is a watchdog, and end it, because the run is done."""
    if process.is_watched.is_set():
        _finish_uploads()
    process.leave_watchdog()


def _finish_uploads() -> None:
    """Finish wandb's upload now: once other ranks have ended, srun ends this one after a few seconds."""
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.finish()


def is_known(process: Process) -> bool:
    """Return whether the ranks have agreed on the first failure."""
    return process.watchdog is not None and process.has_failed.is_set()


def report_failure(error: BaseException, cfg: DictConfig, run: RunContext) -> int | None:
    """Report an error to the user, and return the exit code.

    The code is None for a bug in a run of one process, because Python prints its traceback.
    """
    if isinstance(error, ReportedElsewhere):
        run.process.note_failure(f"error: {error}")
        return ExitCode.REFUSED
    has_begun = run.process.steps_have_begun.is_set()
    if (member := run.process.watchdog) is not None:
        from lightswitch.failures.watchdog import Member  # slow to import, but already imported here

        assert isinstance(member, Member)
        first = member.verdict or member.fail(classify.failure(error, cfg, member.rank, has_begun))
        return first.exit_code
    report = CrashReport(run)
    rank = classify.rank_of(run.placement)
    first = classify.failure(error, cfg, rank, has_begun)
    if first.exit_code == ExitCode.REFUSED or rank.world_size != 1:
        return _report(first, report)
    run.process.note_failure(one_line(error))
    crash_report.add_report(error, first, rank, "outside of the Trainer", report)
    report.log(first.details)
    return None


def _report(first: Failure, report: CrashReport) -> int:
    if first.exit_code == ExitCode.REFUSED:
        report.run.process.note_failure(first.line)
        if print_once(first.line, is_alone=not report.run.placement.is_external):
            report.log_details(first.details)
        return ExitCode.REFUSED
    crash_report.write_for_torchrun(first)
    return report.print_failure(first)


def log_error(error: BaseException, run: RunContext) -> None:
    """Write an error to the run's log only."""
    CrashReport(run).log(full_traceback(error))


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
        _requeue(job)
    elif is_asking and stopped.by in REQUEUED:
        log.warning(
            "%s came before a step was trained; if its time limit was near, ask for more --time", stopped.by.name
        )
    return stopped


def _is_preempted(job: str) -> bool:
    shown = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True).stdout
    return re.search(r"\bPreemptTime=\d", shown) is not None


def _requeue(job: str) -> None:
    done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
    if done.returncode:
        log.error("job %s can't be requeued: %s", job, done.stderr.strip())
    else:
        log.info("requeued   job %s", job)
