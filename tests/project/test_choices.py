"""Every choice of conf composes, and the code that it names is there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightswitch.cluster.placement import Placement
from lightswitch.launch.hydra_entry import register_resolvers
from lightswitch.preflight import root_keys, targets
from lightswitch.preflight.targets import signature
from tests.project.promises import CONF, choices

GROUPS = ("model", "data", "optimizer", "scheduler", "experiment", "strategy", "callbacks")


@pytest.mark.parametrize(("group", "choice"), [(group, choice) for group in GROUPS for choice in choices(group)])
def test_a_choice_composes_and_names_code_that_is_there(group: str, choice: str) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", overrides=[f"{group}={choice}"])
    for target in _targets(OmegaConf.to_container(cfg, resolve=False)):
        assert callable(get_object(target)), target


@pytest.mark.parametrize("model", choices("model"))
def test_what_is_typed_of_optimizer_and_scheduler_is_read_or_refused(model: str) -> None:
    cfg = _with_data(model)
    given = OmegaConf.to_container(cfg.model, resolve=False).values()
    for group in ("optimizer", "scheduler"):
        keys = [f"{group}.{key}" for key in cfg[group] if not key.startswith("_")]
        assert {*root_keys.unread(cfg, keys)} == ({*()} if "${" + group + "}" in given else {*keys})


@pytest.mark.parametrize("group", ["model", "data"])
def test_each_key_that_a_choice_has_is_taken_by_another_or_refused_by_its_name(group: str) -> None:
    nodes = [OmegaConf.to_container(OmegaConf.load(CONF / group / f"{choice}.yaml")) for choice in choices(group)]
    targets_of = (node["_target_"] for node in nodes if "_target_" in node)
    classes = {target: takes for target in targets_of if (takes := signature(target))}
    keys = {key for node in nodes for key in node if key not in ("_target_", "defaults")}
    keys |= {key for takes in classes.values() for key in takes.parameters}
    for target, takes in classes.items():
        for key in keys if not takes.open_ended else ():
            told = [*targets.problems({group: {"_target_": target, key: "1"}}, {group})]
            line = f"{group}.{key}: {target.rpartition('.')[2]} takes no {key}"
            assert any(one.startswith(line) for one in told) == (key not in takes.parameters), told


def _with_data(model: str) -> DictConfig:
    """The config of a model with the first data that have what it refers to."""
    register_resolvers(Placement("local"))
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for data in choices("data"):
            words = [f"model={model}", f"data={data}", "run_id=x", "hydra.runtime.output_dir=x"]
            cfg = compose("config", overrides=words, return_hydra_config=True)
            HydraConfig.instance().set_config(cfg)
            OmegaConf.set_struct(cfg, False)
            del cfg["hydra"]
            try:
                OmegaConf.to_container(cfg, resolve=True)
            except OmegaConfBaseException:
                continue
            return cfg
    raise ValueError(f"no data of conf fit model={model}")


def _targets(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if "_target_" in node:
            yield node["_target_"]
        for value in node.values():
            yield from _targets(value)
