"""The start of a run in one process: Hydra composes its config from the command line, and the main function gets it."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
import hydra._internal.hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightswitch import patches
from lightswitch.cluster import placement
from lightswitch.cluster.placement import Placement
from lightswitch.config import hydra_versions
from lightswitch.config.hydra_errors import NO_YAML, check_flags, problems_of_composition
from lightswitch.config.overrides import asks_for_a_sweep, asks_for_help, check_names, normalised
from lightswitch.context import RunContext
from lightswitch.errors import Ended, Refused, RefusedRequest, Stopped
from lightswitch.launch import ending
from lightswitch.preflight import devices
from lightswitch.preflight.targets import own_batch
from lightswitch.process import Process, Signals, ignore_signals
from lightswitch.runs import claim, resume

if TYPE_CHECKING:
    from lightswitch.sweeps.job import Pool

log = logging.getLogger(__name__)


Main = Callable[[DictConfig, RunContext], None]


class Entry:
    """The start of a script's main function in one process."""

    def __init__(self, main: Main) -> None:
        self.main = main
        self.process = Process()
        self.signals = Signals(self.process, ending.requeue_after)
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
        except (HydraException, OmegaConfBaseException, OSError, Refused, *NO_YAML) as error:
            if self.is_composed:
                raise
            if isinstance(error, BrokenPipeError):  # the reader has closed the pipe, as in `--help | head`
                ending.leave_stdout()
                return
            ending.refuse(problems_of_composition(error))
        finally:
            self.process.locks.close()

    def _run_hydra(self, config_path: str, config_name: str) -> None:
        patches.replace(hydra._internal.hydra, "Hydra", type("Hydra", (_Hydra,), {"process": self.process}))
        devices.check_environment()
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
        def composed(cfg: DictConfig, pool: Pool | None = None) -> None:
            self._run_composed(cfg, pool)

        with hydra_versions.any_target():
            hydra.main(**hydra_versions.VERSION, config_path=str(folder), config_name=config_name)(composed)()

    def _run_composed(self, cfg: DictConfig, pool: Pool | None) -> None:
        from lightswitch.launch import spawn  # not above: a mistyped choice is reported sooner

        found = placement.detect()
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            from lightswitch.sweeps import job

            gc.enable()
            assert pool is not None  # of multirun, whose launcher starts all jobs
            job.run(self.typed, cfg, pool)
            return
        self.is_composed = True
        hydra = HydraConfig.get()
        folder, mode = Path(hydra.runtime.output_dir), str(cfg.get("mode"))
        run = RunContext(folder, str(cfg.get("run_id")), mode, found, hydra, self.process, self.signals)
        if cfg.get("mode") == "fit":
            _resume_restarted(cfg, run)
        if not OmegaConf.is_missing(run.hydra.job, "num") and found.rank == 0:
            from lightswitch.sweeps import job

            self.process.failure_file = run.run_dir / job.FAILURE
        try:
            if not spawn.has_run(cfg, run):
                self.main(cfg, run)
            ending.finish(run.process)
        except Stopped as stopped:
            ending.stop(stopped, cfg, run)
        except Ended:
            ignore_signals()
            run.process.end_ranks()
            raise
        except BaseException as error:  # also a SystemExit raised by the model: the run is not finished
            ending.answer(error, cfg, run)


def _resume_restarted(cfg: DictConfig, run: RunContext) -> None:
    """Resume a run that its launcher has started again: its command says where the first start was to begin."""
    typed = [f"{name}={value}" for name in ("ckpt_path", "resume") if (value := cfg.get(name)) not in (None, "auto")]
    job = claim.restarted_job()
    if typed and job is not None and resume.has_saved(run.run_dir, job):
        if run.is_first:
            log.info("restart    of %s, which has begun with %s: it resumes what it has saved since", job, typed[0])
        cfg.ckpt_path, cfg.resume = None, "auto"


class _Hydra(hydra._internal.hydra.Hydra):
    """Hydra that composes a run's config once, not twice, and whose sweeps lightswitch.sweeps runs."""

    process: Process
    composed: DictConfig | None = None

    def get_mode(self, config_name: str | None, overrides: list[str], **parsed: Any) -> Any:
        """Return whether the config asks for a run or a sweep, and keep the config of a run.

        Args:
            parsed: the overrides once more, parsed by Hydra 1.4.
        """
        if asks_for_a_sweep(sys.argv[1:]):  # even with a single job; Hydra then overrides the mode of the jobs
            return None
        cfg = self.compose_config(config_name, overrides, RunMode.RUN, with_log_configuration=True)
        check_names(cfg)
        if cfg.hydra.mode != RunMode.MULTIRUN:
            self.composed = cfg
        return cfg.hydra.mode

    def compose_config(self, *arguments: Any, **named: Any) -> DictConfig:
        cfg, self.composed = self.composed, None
        return cfg or super().compose_config(*arguments, **named)

    def multirun(self, config_name: str | None, task_function: Any, overrides: list[str], *_: Any, **__: Any) -> None:
        """Run a sweep, and print its table; Hydra calls no hook if a sweep ends early."""
        from lightswitch.sweeps import multirun

        walk_jobs = functools.partial(super().multirun, config_name, task_function)
        multirun.run(walk_jobs, self, config_name, overrides, self.process)


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
    """The run id of this process, determined once, because a config is resolved several times."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._found: str | None = None

    def __call__(self, *, _root_: DictConfig) -> str:
        if self._found is None:
            self._found = claim.new_run_id(cfg=_root_, process=self._process)
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
    return own_batch(_root_) or otherwise


def _run_name(*, _root_: DictConfig) -> str:
    """Return the choice of model, or the name of its class if the command line named one."""
    hydra = _root_.hydra if "hydra" in _root_ else HydraConfig.get()  # the former while a sweep names its directory
    choice = hydra.runtime.choices.get("model")
    if choice is None and "model" not in _root_ and "hydra" not in _root_:
        raise RefusedRequest(["model: the config has no such key, and the engine reads it; add it to config.yaml"])
    target = (_root_.get("model") or {}).get("_target_", "sweep")  # a sweep over classes has none of its own
    return (choice or str(target).rpartition(".")[2].lower()).replace("/", "_")  # a choice may be in a subfolder
