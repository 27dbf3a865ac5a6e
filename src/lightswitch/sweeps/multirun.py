"""A sweep: many runs from one command, each with processes and a directory of its own."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from hydra._internal.hydra import Hydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from lightswitch import patches
from lightswitch.cluster import placement
from lightswitch.config.composition import check_names
from lightswitch.config.confidential import Cleaner
from lightswitch.config.overrides import quoted
from lightswitch.errors import ExitCode, Refused, RefusedRequest
from lightswitch.preflight import root_keys
from lightswitch.process.state import Process
from lightswitch.runs import claim, results
from lightswitch.sweeps import mistakes, record, table


def patch_multirun(process: Process, of_jobs: Callable[[DictConfig, Path], Iterable[str]]) -> None:
    """Have Hydra's sweeps end with a table of their jobs, and with exit code 1 if a job failed.

    After the table they print what `of_jobs` yields of the sweep's config and directory.

    Hydra has a hook for the end of a sweep, but not for one that ends early.
    """
    walk = Hydra.multirun

    def multirun(
        self: Hydra,
        config_name: str | None,
        task_function: Any,
        overrides: list[str],
        with_log_configuration: bool = True,
    ) -> None:
        cfg = self.compose_config(config_name, overrides, RunMode.MULTIRUN, with_log_configuration=False)
        try:
            _check(cfg, partial(self.config_loader.load_sweep_config, cfg))
            folder = _claimed(cfg, process)
        except RefusedRequest as refused:
            raise RefusedRequest(Cleaner.of(cfg).cleaned(refused.problems)) from refused
        pinned = f"hydra.sweep.dir={quoted(str(folder))}"  # a job on another machine can't resolve the time or id in it
        arguments = (config_name, task_function, [*overrides, pinned], with_log_configuration)
        try:
            _run_jobs(partial(walk, self, *arguments), folder)
        finally:
            process.release_locks()
            claim.remove_if_empty(folder)
            jobs = record.read_all(folder)
            logged = {name for file in folder.glob(f"*/{results.FILE}") for name in results.read(file.parent)}
            print(table.of(jobs, str(cfg.objective), logged), end="", flush=True)
        for told in of_jobs(cfg, folder) if jobs else ():
            print(f"\n{told}" if told.endswith("\n") else told, flush=True)
        if any(job.has_failed for job in jobs):
            raise SystemExit(ExitCode.FAILED)

    patches.replace(Hydra, "multirun", multirun)


def _check(cfg: DictConfig, compose: mistakes.Compose) -> None:
    """Check what is wrong with a sweep as such, then with all its jobs.

    Raises:
        RefusedRequest: with all problems found.
    """
    if problems := list(_problems(cfg)):
        raise RefusedRequest(problems)
    check_names(cfg)
    if problems := mistakes.of_all_jobs(cfg, compose):
        raise RefusedRequest(problems)


def _claimed(cfg: DictConfig, process: Process) -> Path:
    """Return the sweep's folder, which no other start of it uses until this process ends.

    Raises:
        RefusedRequest: another process has it.
    """
    folder = Path(str(cfg.hydra.sweep.dir)).absolute()
    try:
        claim.take_folder(folder, process)
    except Refused as refused:
        raise RefusedRequest(refused.problems) from refused
    return folder


def _run_jobs(walk: Callable[[], None], folder: Path) -> None:
    """Run the jobs of a sweep; where a signal ends it, those that it has submitted to a cluster are cancelled.

    Args:
        walk: Hydra's own `multirun`.
    """
    submitted_before = _submitted(folder)
    try:
        walk()
    except (KeyboardInterrupt, SystemExit):
        _cancel(_submitted(folder) - submitted_before)
        raise
    except (HydraException, RefusedRequest):  # a problem of what was typed
        raise
    except Exception as error:
        if isinstance(cause := error.__cause__, subprocess.CalledProcessError) and "sbatch" in cause.cmd:
            raise RefusedRequest([f"sbatch takes no job: {' '.join(str(error).split())}"]) from error
        if not any(job.has_failed for job in record.read_all(folder)):
            raise
        print(f"the sweep ended early: {str(error).splitlines()[0]}")  # as when Optuna has no finished trial


def _problems(cfg: DictConfig) -> Iterator[str]:
    yield from root_keys.missing(cfg)
    yield from root_keys.no_switch("compare", cfg.get("compare", False))
    found = placement.detect()
    if found.is_external:
        yield (
            f"a sweep starts the processes of its jobs itself, and {found.launcher} has started this one; "
            "type python train.py -m … with trainer.devices=N, or with hydra/launcher=submitit_slurm on a cluster"
        )
    launcher = cfg.hydra.launcher
    if str(launcher._target_).endswith("submitit_launcher.SlurmLauncher") and shutil.which("sbatch") is None:
        yield (
            "hydra/launcher=submitit_slurm: this machine has no sbatch; start the sweep on one of the cluster's, or "
            "leave the launcher out"
        )
    if str(launcher._target_).endswith("submitit_launcher.LocalLauncher") and launcher.tasks_per_node > 1:
        yield (
            f"hydra.launcher.tasks_per_node={launcher.tasks_per_node}: only Slurm's tasks find each other; "
            f"leave it out and use trainer.devices={launcher.tasks_per_node}"
        )


def _submitted(folder: Path) -> set[str]:
    """Return the ids of jobs submitted to a cluster, from the folder that submitit keeps."""
    return {path.name.partition("_")[0] for path in folder.glob(".submitit/[0-9]*")}


def _cancel(job_ids: set[str]) -> None:
    if job_ids:
        subprocess.run(["scancel", *sorted(job_ids)], check=False)
