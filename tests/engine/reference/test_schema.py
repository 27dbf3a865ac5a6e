"""What an editor knows of conf: every file of it is right, and what train.py would refuse is marked."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator
from omegaconf.basecontainer import get_yaml_loader

from lightswitch.reference.schema import schemas
from tests.engine.conftest import CHECKOUT

CONF = CHECKOUT / "conf"
SCHEMAS = schemas(CONF)
FSDP = "_target_: lightswitch.strategies.fsdp.FSDP"


def _problems(group: str, content: Any) -> list[str]:
    return [error.message for error in Draft7Validator(SCHEMAS[group]).iter_errors(content)]


def test_every_file_of_conf_is_right() -> None:
    for schema in SCHEMAS.values():
        Draft7Validator.check_schema(schema)
    for path in CONF.rglob("*.yaml"):
        if "hydra" not in path.parts:
            group = "config" if path.parent == CONF else path.parent.name
            content = yaml.load(path.read_text(), get_yaml_loader())  # the server reads 1e-3 as a number, too
            assert _problems(group, content or {}) == [], path


@pytest.mark.parametrize(
    ("group", "content", "told"),
    [
        ("optimizer", "{_target_: torch.optim.AdamW, wieght_decay: 0.1}", "'wieght_decay' was unexpected"),
        ("trainer", "{_target_: lightning.pytorch.Trainer, max_stps: 1}", "'max_stps' was unexpected"),
        ("experiment", "{trainer: {max_steps: many}}", "'many' is not valid"),
        ("strategy", f"{{strategy: {{{FSDP}, shard: 2}}}}", "'shard' was unexpected"),
        ("strategy", f"{{strategy: {{{FSDP}}}, precison: 16}}", "'precison' was unexpected"),
        ("precision", "{precision: bf17}", "'bf17' is not valid"),
        ("experiment", "{seed: many}", "'many' is not valid"),
        ("config", "{on_nan: retry}", "'retry' is not one of ['stop', 'skip', 'ignore']"),
        ("experiment", "{global_batchsize: 64}", "'global_batchsize' was unexpected"),
        ("config", "{watch: {lost_after: 60}}", "'lost_after' was unexpected"),
    ],
)
def test_what_is_misspelt_or_of_a_wrong_type_is_marked(group: str, content: str, told: str) -> None:
    (problem,) = _problems(group, yaml.safe_load(content))
    assert told in problem


@pytest.mark.parametrize("value", ["${trainer.max_steps}", "???", 10, None])
def test_an_interpolation_stands_for_any_value(value: Any) -> None:
    assert _problems("trainer", {"_target_": "lightning.pytorch.Trainer", "max_epochs": value}) == []
