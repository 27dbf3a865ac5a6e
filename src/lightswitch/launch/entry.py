"""The way into train.py: from the command line to a composed config, or to a line that says what is wrong with it."""

from __future__ import annotations

import functools
import gc
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lightswitch.cluster import placement, processes
from lightswitch.config import composition
from lightswitch.config.hydra_errors import check_flags, of_composition
from lightswitch.config.overrides import normalised
from lightswitch.errors import Ended, RefusedRequest, Stopped
from lightswitch.fault_tolerance import requeue, signals
from lightswitch.launch import commands, ending, resolvers
from lightswitch.preflight import environment
from lightswitch.runs import claim
from lightswitch.sweeps import job, multirun

log = logging.getLogger(__name__)

Main = Callable[[DictConfig], None]


def entry(config_path: str, config_name: str) -> Callable[[Main], Callable[[], None]]:
    """`hydra.main`, with arguments as people type them and errors as people read them.

    What a user can mend ends with exit code 2 and no traceback; a bug keeps its traceback.
    """

    def decorate(main: Main) -> Callable[[], None]:
        composed = False
        typed: list[str] = []

        @functools.wraps(main)
        def guarded(cfg: DictConfig) -> float | None:
            nonlocal composed
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                gc.enable()
                return job.run(typed, cfg)
            composed = True
            try:
                main(cfg)
                ending.leave_watchdog()
            except Stopped as stopped:
                _stop(stopped, cfg)
            except Ended:
                signals.ignore()
                processes.end_ranks()
                raise
            except BaseException as error:  # also a SystemExit of the model's own code: the run is not finished
                _answer(error, cfg)
            return None

        hydra_main = hydra.main(version_base="1.3", config_path=config_path, config_name=config_name)(guarded)

        def run() -> None:
            # Threads that wait by spinning slow a run tenfold where it shares its cores; they cost nothing asleep.
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
            os.environ["HYDRA_FULL_ERROR"] = "1"  # or Hydra prints a bug in its own way, and exits with 1
            signals.catch()
            gc.disable()  # until all is imported (lightswitch.launch.build): many objects, and little garbage
            composition.shorten()
            multirun.oversee()
            resolvers.register()
            try:
                environment.check()
                if placement.detect().launcher == "local" and "LOCAL_RANK" in os.environ:
                    processes.follow_parent()
                sys.argv[1:] = normalised(sys.argv[1:])
                check_flags(sys.argv[1:])
                typed[:] = [str(Path(sys.argv[0]).absolute()), *sys.argv[1:]]
                hydra_main()
                signals.ignore()
            except Stopped as stopped:
                signals.ignore()
                raise requeue.after(stopped) from None
            except (HydraException, OmegaConfBaseException, OSError, RefusedRequest) as error:
                if composed:
                    raise
                ending.exit_with(of_composition(error))
            finally:
                claim.give_back()

        return run

    return decorate


def _answer(error: BaseException, cfg: DictConfig) -> NoReturn:
    behind = None if ending.is_known() else signals.behind(error)  # launchers end the ranks left over
    if behind is not None:
        ending.log(error, cfg)
        _stop(behind, cfg)
    code = ending.answer(error, cfg)
    signals.ignore()  # of the ranks' launcher, which ends those that are left when one has ended
    processes.end_ranks()
    claim.give_back()
    claim.remove_if_empty(Path(HydraConfig.get().runtime.output_dir))  # Hydra makes it at once
    if code is not None:
        raise SystemExit(code) from None
    if isinstance(error, Exception):
        raise error
    raise RuntimeError(f"the run was ended before it was finished, by {error!r}") from error


def _stop(stopped: Stopped, cfg: DictConfig) -> NoReturn:
    ending.withdraw_from_watchdog()
    processes.end_ranks()
    if placement.detect().rank == 0:
        log.info("stopped    by %s", stopped.by.name)
        log.info("go on      %s", commands.again(cfg))
    raise stopped from None
