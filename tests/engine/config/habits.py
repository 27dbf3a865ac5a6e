"""Habits: what users of lightning-hydra-template and readers of guides type (habits.yaml).

tests/engine/tables/habits.py types those of lightning-hydra-template, with a module and data of its form, for
measured/habits.md; test_habits.py compares page and code, and types what guides to Lightning, torch, accelerate,
transformers and DeepSpeed name.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import yaml

from tests.engine.conftest import CHECKOUT, PLAIN

CONF = CHECKOUT / "tests/engine/config/template/conf"
MODEL_AND_DATA = ("model=mnist", "data=mnist")

TABLE = yaml.safe_load(Path(__file__).with_name("habits.yaml").read_text())
COMMANDS: list[str] = TABLE["commands"]
REFUSED: list[str] = TABLE["refused"]
WORKS: dict[str, str] = TABLE["works"]
LOADS: dict[str, str] = TABLE["loads"]
GUIDES: dict[str, dict[str, str]] = TABLE["guides"]
GUIDES_ALONE: dict[str, str] = TABLE["guides_alone"]
GUIDES_CHOICES: dict[str, str] = TABLE["guides_choices"]
GUIDES_WORK: list[str] = TABLE["guides_work"]


def words(typed: str) -> list[str]:
    """What a habit is as the arguments of train.py, with that model and data where it names no others."""
    own = shlex.split(typed)
    others = [word for word in MODEL_AND_DATA if not any(one.startswith(word.partition("=")[0] + "=") for one in own)]
    return ["--config-dir", str(CONF), *others, *own]


def as_in_a_shell(typed: str) -> list[str]:
    """Return the words of a command line with a small model and data; variables of its environment come first."""
    words = shlex.split(typed)
    variables = [word for word in words if re.match("[A-Z_]+=", word)]
    return [*variables, *PLAIN, *(word for word in words if word not in variables)]
