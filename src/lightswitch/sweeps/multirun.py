"""Check and run a sweep: many runs from one command, each with its own processes and directory."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobStatus
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from lightswitch import patches
from lightswitch.cluster import placement
from lightswitch.config import aliases
from lightswitch.config.confidential import masked_override
from lightswitch.config.overrides import check_names, key_and_value, quoted, typed_overrides
from lightswitch.errors import ExitCode, RefusedRequest, shown
from lightswitch.preflight import check, devices, root_keys
from lightswitch.process import Process
from lightswitch.runs import claim
from lightswitch.sweeps import record
from lightswitch.sweeps.job import Pool
from lightswitch.sweeps.record import FINISHED, NOT_BEGUN, Record

_MOST_CHECKED = 20  # jobs that are composed before the first one starts


def run(
    walk: Callable[[list[str]], None], hydra: Hydra, config_name: str | None, overrides: list[str], process: Process
) -> None:
    """Run the jobs of a sweep, then print their table, and the commands to go on and to compare them.

    Args:
        walk: Hydra's original `multirun`, called with the overrides.

    Raises:
        RefusedRequest: the sweep has problems, or all its jobs share some.
        Refused: another process has its folder.
        SystemExit: with code 1 if a job failed.
    """
    cfg = hydra.compose_config(config_name, overrides, RunMode.MULTIRUN, with_log_configuration=False)
    check_names(cfg)
    if problems := list(_problems(cfg)) or shared_problems(cfg, partial(hydra.config_loader.load_sweep_config, cfg)):
        raise RefusedRequest(problems)
    folder = Path(str(cfg.hydra.sweep.dir)).absolute()
    claim.take_folder(folder, process)  # until this process ends
    pinned = f"hydra.sweep.dir={quoted(str(folder))}"  # in each job the same time and id
    planned: list[Record] = []
    try:
        with Pool(slots(cfg)) as pool:
            _launch_in(pool, planned)
            _run_jobs(partial(walk, [*overrides, pinned]), folder)
    finally:
        process.locks.close()
        claim.remove_if_empty(folder)
        there = {job.number: job for job in record.read_all(folder)}
        jobs = [*({job.number: job for job in planned} | there).values()]
        print(record.table(jobs, str(cfg.objective)), end="", flush=True)
        if any(job.state != FINISHED for job in jobs):
            print(f"\ngo on      {go_on(cfg)}", flush=True)
    if len(jobs) > 1:
        print(f"\ncompare    python -m lightswitch.compare {shlex.quote(shown(folder))}", flush=True)
    if any(job.has_failed for job in jobs):
        raise SystemExit(ExitCode.FAILED)


def _launch_in(pool: Pool, planned: list[Record]) -> None:
    """Let Hydra's own launcher start jobs in a pool, wait for them, and note all that it is to start."""
    original = BasicLauncher.launch

    def launch(self: BasicLauncher, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Any:
        numbered = enumerate(job_overrides, initial_job_idx)
        planned.extend(Record(number, list(overrides), "", NOT_BEGUN) for number, overrides in numbered)
        task: Callable[..., Any] | None = self.task_function
        assert task is not None
        self.task_function = partial(task, pool=pool)
        returned = original(self, job_overrides, initial_job_idx)
        pool.wait()
        for one in (one for one in returned if one.status == JobStatus.COMPLETED):  # others raise their error
            assert one.hydra_cfg is not None
            ended = record.read(Path(one.hydra_cfg.hydra.runtime.output_dir))
            one.return_value = ended.comparable_objective if ended is not None else None
        return returned

    patches.replace(BasicLauncher, "launch", launch)


def slots(cfg: DictConfig) -> list[dict[str, str]]:
    """Return the environment variables of each slot of a sweep's pool, of its node `sweep`."""
    asked = cfg.get("sweep") or {}
    at_once, each = asked.get("jobs_at_once"), asked.get("devices_per_job")
    if not each:
        return [{} for _ in range(at_once or 1)]
    gpus = visible_gpus()
    groups = [gpus[at : at + each] for at in range(0, len(gpus) - each + 1, each)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(group)} for group in groups[:at_once]]


def visible_gpus() -> list[str]:
    """Return the indices or names of the GPUs that this process sees, as CUDA_VISIBLE_DEVICES lists them."""
    count = devices.present().cuda
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(index) for index in range(count)]


def go_on(cfg: DictConfig) -> str:
    """Return the command that starts the sweep again; what has finished is not run again."""
    hydra = [word for word in cfg.hydra.overrides.hydra if not word.startswith("hydra.mode=")]
    typed = [masked_override(word) for word in typed_overrides(cfg.hydra)]
    named = [] if any(word.startswith(("run_id=", "++run_id=")) for word in typed) else [f"run_id={cfg.run_id}"]
    return shlex.join(["python", sys.argv[0], "-m", *hydra, *typed, *named])


def _run_jobs(walk: Callable[[], None], folder: Path) -> None:
    """Run the jobs of a sweep, which Optuna ends early if no trial has an objective.

    Args:
        walk: Hydra's original `multirun`.
    """
    try:
        walk()
    except (HydraException, RefusedRequest):  # invalid overrides or config
        raise
    except Exception as error:
        has_failed = any(job.has_failed for job in record.read_all(folder))
        if not has_failed and "No trials are completed" not in str(error):  # Optuna's, if all objectives are NaN
            raise
        print(f"the sweep ended early: {str(error).splitlines()[0]}")


def _problems(cfg: DictConfig) -> Iterator[str]:
    typed = {key_and_value(override)[0].partition(".")[0] for override in typed_overrides(cfg.hydra)}
    # Hydra leaves swept values out of the sweep's own config; each job has one
    yield from (line for line in root_keys.missing(cfg) if line.partition(":")[0] not in typed)
    place = placement.detect()
    if place.is_external:
        yield (
            f"a sweep starts the processes of its jobs itself, but {place.launcher} has started this process; "
            "type python train.py -m … trainer.devices=N without it"
        )
    if not str(cfg.hydra.launcher._target_).endswith(".BasicLauncher"):
        name = cfg.hydra.runtime.choices["hydra/launcher"]
        yield f"hydra/launcher={name}: a sweep starts its jobs itself; leave it out, and type {aliases.AT_ONCE}"
    each = (cfg.get("sweep") or {}).get("devices_per_job")
    if type(each) is int and len(found := visible_gpus()) < each:
        yield f"sweep.devices_per_job={each}: found {len(found)} GPUs; on CPUs type sweep.jobs_at_once=2"


def shared_problems(cfg: DictConfig, compose: Callable[[list[str]], DictConfig]) -> list[str]:
    """Return the problems that the first jobs of a grid and its last one have in common.

    If one of them can't be composed, return no problems: the job itself reports that.

    Args:
        cfg: config of the sweep.
        compose: returns the config of a job, given its overrides.
    """
    sweeper = cfg.hydra.sweeper
    if not str(sweeper._target_).endswith(".BasicSweeper"):
        return []
    params = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
    parsed = OverridesParser.create().parse_overrides([*params, *typed_overrides(cfg.hydra)])
    (jobs,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    found = (_problems_of_job(compose(list(overrides))) for overrides in [*jobs[:_MOST_CHECKED], jobs[-1]])
    with contextlib.suppress(HydraException, OmegaConfBaseException):
        shared = next(found)
        while shared and (other := next(found, None)) is not None:
            also = {problem.partition(";")[0] for problem in other}  # what to type has each job's value
            shared = [problem for problem in shared if problem.partition(";")[0] in also]
        return shared
    return []


def _problems_of_job(job: DictConfig) -> list[str]:
    place = {"job.num": 0, "job.id": "0", "runtime.output_dir": str(job.hydra.sweep.dir)}  # as a launcher sets it
    for key, value in place.items():
        OmegaConf.update(job, f"hydra.{key}", value, force_add=True)
    HydraConfig.instance().set_config(job)
    hydra = job.hydra
    with open_dict(job):
        del job["hydra"]
    plain: Any = OmegaConf.to_container(job, resolve=True)
    return check.config_problems(plain, hydra) or list(root_keys.unread_problems(job, hydra))
