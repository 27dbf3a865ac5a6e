"""Patches that make Hydra 1.3 compose configs in two thirds of the time, with the same result."""

from __future__ import annotations

import sys
from typing import Any

from hydra._internal.hydra import Hydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lightswitch import patches
from lightswitch.config import names
from lightswitch.config.confidential import Cleaner
from lightswitch.config.overrides import asks_for_a_sweep
from lightswitch.errors import RefusedRequest


def patch_composition() -> None:
    """Keep the config that Hydra composes to see whether it asks for a sweep, and would compose again to run it."""
    look = Hydra.get_mode

    def get_mode(self: Hydra, config_name: str | None, overrides: list[str]) -> Any:
        if asks_for_a_sweep(sys.argv[1:]):  # also if it has a single job
            return look(self, config_name, overrides)
        try:
            cfg = self.compose_config(config_name, overrides, run_mode=RunMode.RUN)
        except (HydraException, OmegaConfBaseException):
            return look(self, config_name, overrides)  # a sweep, or a problem that the run will report
        check_names(cfg)
        if cfg.hydra.mode != RunMode.MULTIRUN:
            patches.replace(self.config_loader, "load_configuration", lambda *_, **__: cfg)
        return cfg.hydra.mode

    patches.replace(Hydra, "get_mode", get_mode)


def check_names(cfg: DictConfig) -> None:
    """Check a run's name and id before a directory is made of them.

    Raises:
        RefusedRequest: they can't be names of folders.
    """
    try:
        given = {key: cfg[key] for key in ("name", "run_id") if key in cfg}
    except OmegaConfBaseException:  # the run will report it
        return
    if problems := list(names.problems(given)):
        raise RefusedRequest(Cleaner.of(cfg).cleaned(problems))
