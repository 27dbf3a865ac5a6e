"""From the command line to a composed config and its RunContext, or to messages about it, by Hydra."""

from __future__ import annotations

import functools
import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightswitch import patches
from lightswitch.cluster import placement
from lightswitch.config import composition
from lightswitch.config.hydra_errors import NO_YAML, check_flags, problems_of_composition
from lightswitch.config.overrides import asks_for_help, normalised
from lightswitch.context import RunContext
from lightswitch.errors import Ended, RanksFailed, RefusedRequest, Stopped
from lightswitch.failures import classify, requeue
from lightswitch.launch import commands, ending, resolvers
from lightswitch.preflight import environment, targets
from lightswitch.process import signals
from lightswitch.process.signals import Signals, stopped_with
from lightswitch.process.state import Process
from lightswitch.runs import claim

log = logging.getLogger(__name__)

Main = Callable[[DictConfig, RunContext], None]


class Entry:
    """One process's start of a script's main function. A sweep's launcher may send a copy to another machine."""

    def __init__(self, main: Main) -> None:
        self.main = main
        self.process = Process()
        self.signals = Signals(self.process)
        self.is_composed = False
        self.typed: list[str] = []  # the script and its arguments

    def run(self, config_path: str, config_name: str) -> None:
        """Compose the config and run the main function on it, or each job of a sweep.

        Raises:
            SystemExit: the run was refused, stopped, or has failed.
        """
        # Threads that wait by spinning slow a run tenfold where it shares its cores; they cost nothing asleep.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        os.environ["HYDRA_FULL_ERROR"] = "1"  # or Hydra prints a bug in its own way, and exits with 1
        self.signals.catch(is_first=False)  # the rank is not known yet
        logging.getLogger("torch").setLevel(logging.WARNING)  # as torch does once it is imported, if it comes so far
        gc.disable()  # until all is imported (launch/build turns it on): many objects, and little garbage
        try:
            self._run_hydra(config_path, config_name)
            signals.ignore()
        except Stopped as stopped:
            signals.ignore()
            raise requeue.after(stopped, self.signals.is_first) from None
        except (HydraException, OmegaConfBaseException, OSError, RefusedRequest, *NO_YAML) as error:
            if self.is_composed:
                raise
            if isinstance(error, BrokenPipeError):  # as `--help | head` ends: enough was read
                _leave_stdout()
                return
            ending.exit_with(problems_of_composition(error, targets.parameters))
        finally:
            self.process.release_locks()

    def _run_hydra(self, config_path: str, config_name: str) -> None:
        composition.patch_composition()
        _patch_multirun(self.process)
        environment.check()
        found = placement.detect()
        self.signals.catch(is_first=found.rank == 0)
        resolvers.register(found)
        if found.launcher == "local" and "LOCAL_RANK" in os.environ:
            self.process.follow_parent()
        if found.launcher == "torchrun":
            self.process.end_with_parent()
        if (about := asks_for_help(sys.argv[1:])) is not None:
            from lightswitch.reference import help

            print(help.text(about, Path(sys.argv[0]), Path(sys.argv[0]).parent / config_path))
            return
        sys.argv[1:] = normalised(sys.argv[1:], found.rank)
        check_flags(sys.argv[1:])
        self.typed = [str(Path(sys.argv[0]).absolute()), *sys.argv[1:]]

        @functools.wraps(self.main)  # Hydra finds the script by it, and conf/ beside the script
        def composed(cfg: DictConfig) -> float | None:
            return self._run_composed(cfg)

        hydra.main(version_base="1.3", config_path=config_path, config_name=config_name)(composed)()

    def _run_composed(self, cfg: DictConfig) -> float | None:
        found = placement.detect()  # a cluster's job runs in another process than the one that submitted it
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            from lightswitch.sweeps import job

            gc.enable()
            return job.run(self.typed, cfg, found)
        self.is_composed = True
        classify.keep_disk_errors_of_threads(self.process)
        run = RunContext.of(cfg, HydraConfig.get(), found, self.process, self.signals)
        if not OmegaConf.is_missing(run.hydra.job, "num"):
            from lightswitch.sweeps import job

            self.process.failure_file = job.failure_file(run.run_dir, found)
        try:
            self.main(cfg, run)
            run.process.raise_disk_error()
            _flush_stdout()
            ending.leave_watchdog(run.process)
        except Stopped as stopped:
            _stop(stopped, cfg, run)
        except Ended:
            signals.ignore()
            run.process.end_ranks()
            raise
        except BaseException as error:  # also a SystemExit of the model's own code: the run is not finished
            _answer(error, cfg, run)
        return None


def _patch_multirun(process: Process) -> None:
    """Have lightswitch.sweeps run Hydra's sweeps: Hydra's own hook for their end misses one that ends early."""
    walk = Hydra.multirun

    def multirun(
        self: Hydra,
        config_name: str | None,
        task_function: Any,
        overrides: list[str],
        with_log_configuration: bool = True,
    ) -> None:
        from lightswitch.sweeps import multirun

        def walk_jobs(pinned: list[str]) -> None:
            walk(self, config_name, task_function, pinned, with_log_configuration)

        multirun.run(walk_jobs, self, config_name, overrides, process, _beside_one_another)

    patches.replace(Hydra, "multirun", multirun)


def _beside_one_another(cfg: DictConfig, folder: Path) -> Iterator[str]:
    """Yield what a plan or a comparison says of a sweep's jobs."""
    if cfg.get("mode") == "dry_run":
        from lightswitch.planning import scaling

        yield from scaling.of_sweep(folder)
    elif cfg.get("compare"):
        from lightswitch.compare import page

        yield from page.of_sweep(folder)


def _flush_stdout() -> None:
    """Print what is left of a run that is done, if anyone still reads it."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _leave_stdout()


def _leave_stdout() -> None:
    """Lead stdout nowhere: Python still flushes it as it exits, and its reader is gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _answer(error: BaseException, cfg: DictConfig, run: RunContext) -> NoReturn:
    stopped = None if ending.is_known(run.process) else _stop_cause(error, run)  # launchers end the remaining ranks
    if stopped is not None:
        ending.log(error, cfg, run)
        _stop(stopped, cfg, run)
    code = ending.answer(error, cfg, run)
    if isinstance(error, BrokenPipeError):
        _leave_stdout()
    signals.ignore()  # of the launcher, which ends the remaining ranks when one has ended
    run.process.end_ranks()
    run.process.release_locks()
    claim.remove_if_empty(run.run_dir)  # Hydra has made it before all checks
    if code is not None:
        raise SystemExit(code) from None
    if isinstance(error, Exception):
        raise error
    raise RuntimeError(f"the run was ended before it was finished, by {error!r}") from error


def _stop_cause(error: BaseException, run: RunContext) -> Stopped | None:
    """Return the signal behind an error, received by this process or a rank that it spawned; None without one."""
    if run.signals.received is not None:
        return Stopped(run.signals.received)
    codes = [error.exit_code] if isinstance(error, RanksFailed) else [rank.poll() for rank in run.process.ranks]
    return next(filter(None, map(stopped_with, codes)), None)


def _stop(stopped: Stopped, cfg: DictConfig, run: RunContext) -> NoReturn:
    run.process.stop_all_ranks(stopped)
    run.process.end_ranks()
    if run.is_first:
        log.info("stopped    by %s", stopped.by.name)
        log.info("go on      %s", commands.repeat(cfg, run.placement))
    raise stopped from None
