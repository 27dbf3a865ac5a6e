"""Mends of the time that Hydra 1.3 takes to compose a config. Without them all is the same, a third slower."""

from __future__ import annotations

import sys
from typing import Any

from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lightswitch import patches
from lightswitch.config import names
from lightswitch.config.overrides import asks_for_a_sweep
from lightswitch.errors import RefusedRequest


def patch_composition() -> None:
    """Have Hydra compose a config once, and copy no more than it must."""
    _share_store()
    _compose_once()


def check_names(cfg: DictConfig) -> None:
    """Before a directory is made of them.

    Raises:
        RefusedRequest: they are no names.
    """
    try:
        given = {key: cfg[key] for key in ("name", "run_id") if key in cfg}
    except OmegaConfBaseException:  # the run will tell
        return
    if problems := list(names.problems(given)):
        raise RefusedRequest(problems)


def _share_store() -> None:
    """Hydra copies its whole store of built-in configs for each group that `--help` lists: half of its time.

    The store is one for the process and hands out copies of what it holds, so that a copy of it is of no use.
    """
    patches.replace(ConfigStore, "__deepcopy__", lambda store, memo: store)


def _compose_once() -> None:
    """Hydra composes a config to see whether it asks for a sweep, and then again to run it: here the first is kept."""
    look = Hydra.get_mode

    def get_mode(self: Hydra, config_name: str | None, overrides: list[str]) -> Any:
        if asks_for_a_sweep(sys.argv[1:]):  # also one of a single job
            return look(self, config_name, overrides)
        try:
            cfg = self.compose_config(config_name, overrides, run_mode=RunMode.RUN)
        except (HydraException, OmegaConfBaseException):
            return look(self, config_name, overrides)  # a sweep, or a mistake that the run will tell
        check_names(cfg)
        if cfg.hydra.mode != RunMode.MULTIRUN:
            patches.replace(self.config_loader, "load_configuration", lambda *_, **__: cfg)
        return cfg.hydra.mode

    patches.replace(Hydra, "get_mode", get_mode)
