"""What an editor knows of conf: every file of it is right, and what train.py would refuse is marked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator
from omegaconf._utils import get_yaml_loader

from lightswitch.reference.schema import schemas
from tests.engine.conftest import CHECKOUT

CONF = CHECKOUT / "conf"
SCHEMAS = schemas(CONF)
FILES = [path for path in sorted(CONF.rglob("*.yaml")) if "hydra" not in path.parts]


def _problems(group: str, content: Any, known: dict[str, dict[str, Any]] = SCHEMAS) -> list[str]:
    return [error.message for error in Draft7Validator(known[group]).iter_errors(content)]


def test_every_file_of_conf_is_right() -> None:
    for path in FILES:
        group = "config" if path.parent == CONF else path.parent.name
        content = yaml.load(path.read_text(), get_yaml_loader())  # the server reads 1e-3 as a number, too
        assert _problems(group, content or {}) == [], path


def test_every_schema_is_one() -> None:
    for schema in SCHEMAS.values():
        Draft7Validator.check_schema(schema)


ADAMW = {"_target_": "torch.optim.AdamW"}
FSDP = {"_target_": "lightswitch.strategies.fsdp.FSDP"}
MARKED: dict[str, tuple[str, dict[str, Any], str]] = {
    "an argument": ("optimizer", ADAMW | {"wieght_decay": 0.1}, "'wieght_decay' was unexpected"),
    "the Trainer's": ("trainer", {"_target_": "lightning.pytorch.Trainer", "max_stps": 1}, "'max_stps' was unexpected"),
    "a type": ("experiment", {"trainer": {"max_steps": "many"}}, "'many' is not valid"),
    "a strategy's": ("strategy", {"strategy": FSDP | {"shard": 2}}, "'shard' was unexpected"),
    "beside a strategy": ("strategy", {"strategy": FSDP, "precison": 16}, "'precison' was unexpected"),
    "a precision": ("precision", {"precision": "bf17"}, "'bf17' is not valid"),
    "a callback's": (
        "callbacks",
        {"last": {"_target_": "lightswitch.checkpoints.last.LastCheckpoints", "every_steps": 5}},
        "'every_steps' was unexpected",
    ),
    "a type in the config": ("experiment", {"seed": "many"}, "'many' is not valid"),
    "a word of the config": ("config", {"on_nan": "retry"}, "'retry' is not one of ['stop', 'skip', 'ignore']"),
    "a key of the config": ("experiment", {"global_batchsize": 64}, "'global_batchsize' was unexpected"),
    "in a node of the config": ("config", {"watch": {"lost_after": 60}}, "'lost_after' was unexpected"),
}


@pytest.mark.parametrize("case", MARKED)
def test_what_is_misspelt_or_of_a_wrong_type_is_marked(case: str) -> None:
    group, content, expected = MARKED[case]
    (problem,) = _problems(group, content)
    assert expected in problem


@pytest.mark.parametrize("value", ["${trainer.max_steps}", "???", 10, None])
def test_an_interpolation_stands_for_any_value(value: Any) -> None:
    assert _problems("trainer", {"_target_": "lightning.pytorch.Trainer", "max_epochs": value}) == []


def test_a_model_of_ones_own_is_known_once_its_file_is_there(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "trainer").mkdir()
    (tmp_path / "config.yaml").write_text("seed: 42  # of everything\n")
    (tmp_path / "model" / "mine.yaml").write_text("_target_: tests.engine.plain.PlainModel\n")
    known = schemas(tmp_path)
    assert len(_problems("model", {"_target_": "tests.engine.plain.PlainModel", "depht": 3}, known)) == 1
    assert _problems("model", {"_target_": "torch.nn.Linear", "depht": 3}, known) == []
    assert known["config"]["properties"]["seed"]["description"] == "of everything"


def test_a_key_is_explained_by_its_codes_docstring() -> None:
    shown = json.dumps(SCHEMAS["strategy"])
    assert "store parameters, gradients and optimizer state in the host's memory (bool, False by default)" in shown
    assert "Stop training once this number of epochs is reached" in json.dumps(SCHEMAS["trainer"])


def test_every_group_has_its_line_in_the_settings_of_an_editor() -> None:
    settings = json.loads((CHECKOUT / ".vscode" / "settings.json").read_text())["yaml.schemas"]
    expected = {f".vscode/schemas/{group}.json": f"conf/{group}/*.yaml" for group in SCHEMAS}
    assert settings == expected | {".vscode/schemas/config.json": "conf/config.yaml"}
