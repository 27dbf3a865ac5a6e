"""Every choice of conf composes, and the code that it names is there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import get_object
from omegaconf import OmegaConf

from lightswitch.config import moved
from tests.project.choices import CONF, choices

GROUPS = ("model", "data", "optimizer", "scheduler", "experiment", "strategy", "callbacks")


@pytest.mark.parametrize(("group", "choice"), [(group, choice) for group in GROUPS for choice in choices(group)])
def test_a_choice_composes_and_names_code_that_is_there(group: str, choice: str) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", overrides=[f"{group}={choice}"])
    for target in _targets(OmegaConf.to_container(cfg, resolve=False)):
        assert callable(get_object(moved.today(target))), target


def _targets(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if "_target_" in node:
            yield node["_target_"]
        for value in node.values():
            yield from _targets(value)
