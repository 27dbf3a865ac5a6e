"""What is typed and read by nobody is refused by name: each key of --help, against each model and dataset."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightswitch.preflight import root_keys
from lightswitch.reference import choices
from tests.engine.conftest import CHECKOUT, PLAIN, PLAIN_DATA
from tests.engine.requests import composed, composing
from tests.engine.tiny import LANGUAGE_MODEL, TEXT
from tests.night import at_night

CONF = CHECKOUT / "conf"
PARTIAL = ("model._target_=tests.engine.plain.PartialModel", PLAIN_DATA, "model.optimizer=${optimizer}")
GIVEN = ("optimizer", "scheduler")
ELSEWHERE = ("dry_run", "check", "lr_scaling.reference_batch_size")  # of another mode, or of a rule that is none
COMBINATIONS = {  # the words, and the groups that nobody reads there; those of conf: tests/project/test_choices.py
    "a module that takes both": ((*LANGUAGE_MODEL, TEXT), set[str]()),
    "a module with its own optimizer": (PLAIN, {*GIVEN}),
    "a module that takes an optimizer": (PARTIAL, {"scheduler"}),
    "a rate that refers to one": ((*PLAIN, "model.lr=${optimizer.lr}"), {"optimizer but lr", "scheduler"}),
}


@pytest.fixture(autouse=True)
def _conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with composing():
        yield


def _keys() -> list[str]:
    """Those that --help lists: of the config, and of the choices that it begins with."""
    root, groups = choices.config(CONF), choices.groups(CONF)
    chosen = [one for group, name in root.defaults.items() for one in groups.get(group, ()) if one.name == name]
    return [key.path for choice in (root, *chosen) for key in choice.keys if not key.is_node and key.path[0] != "_"]


@pytest.mark.parametrize("combination", ["a rate that refers to one", *at_night(*list(COMBINATIONS)[:-1])])
def test_each_key_of_help_is_read_or_told(combination: str, tmp_path: Path) -> None:
    words, groups = COMBINATIONS[combination]
    keys = [key for key in _keys() if not key.startswith("model.")]  # another's are its signature's
    expected = {key for key in keys if f"{key}.".startswith(tuple(f"{one}." for one in (*groups, *ELSEWHERE)))}
    if "optimizer but lr" in groups:
        expected |= {key for key in keys if key.startswith("optimizer.") and key != "optimizer.lr"}
    assert {*root_keys.unread(composed(*words, into=tmp_path).cfg, keys)} == expected


EXPERIMENTS = {  # the lines of a file, and what its refusals begin with
    "# @package _global_\ndefaults: [{override /scheduler: linear}]\noptimizer: {lr: 1, betas: [0.9, 0.9]}\nseed: 7": [
        "scheduler of experiment=mine: ",
        "optimizer.lr of experiment=mine, optimizer.betas of experiment=mine: ",
    ],
    "seed: 7": [
        "experiment: the keys of its file are set below experiment; begin the file with # @package _global_",
    ],
}


@pytest.mark.parametrize("text", EXPERIMENTS)
def test_what_stands_in_an_experiment_is_told_with_its_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(text)
    request = composed(*PLAIN, "experiment=mine", f"hydra.searchpath=[{tmp_path}]", into=tmp_path)
    told = [*root_keys.unread_problems(request.cfg, request.hydra)]
    assert [line[: len(text)] for line, text in zip(told, EXPERIMENTS[text], strict=True)] == EXPERIMENTS[text]
