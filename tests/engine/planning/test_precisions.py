"""Precisions that a plan compares, by what was asked for and what the device has."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightswitch.planning.device import Device, compared_precisions, precision_problems
from tests.engine.conftest import CHECKOUT

FILES = {path.stem: path for path in sorted((CHECKOUT / "conf" / "precision").glob("*.yaml"))}
NEW, OLD = Device("new", 80, {"fp32": 1, "bf16": 9, "fp16": 9}), Device("old", 16, {"fp32": 1, "fp16": 9})
HERE = Device("here", 80, {})


@pytest.mark.parametrize(
    ("asked", "device", "is_chosen", "names"),
    [
        (None, NEW, True, []),
        (None, NEW, False, ["32-true", "bf16-mixed"]),
        (None, OLD, False, ["32-true", "16-mixed"]),
        (None, HERE, False, []),  # nobody knows what is faster there
        ("bf16-true", NEW, True, ["bf16-true"]),
        (["bf16-mixed", "32-true", "bf16-mixed"], OLD, True, ["bf16-mixed", "32-true"]),
        ("all", HERE, True, ["32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"]),
    ],
)  # fmt: skip
def test_precisions_are_those_asked_for_or_the_faster_of_the_device(
    asked: object, device: Device, is_chosen: bool, names: list[str]
) -> None:
    assert [one.name for one in compared_precisions(asked, FILES, device, is_chosen)] == names


def test_a_precision_is_what_its_file_says(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("# @package trainer\nprecision:\n  _target_: a.Plugin\n")
    found = compared_precisions(["bf16-true", "own"], {**FILES, "own": own}, NEW, is_chosen=False)
    assert [one.value for one in found] == ["bf16-true", {"_target_": "a.Plugin"}]


@pytest.mark.parametrize(
    ("name", "device", "lacks"),
    [("bf16-true", OLD, True), ("bf16-mixed", NEW, False), ("16-mixed", OLD, False), ("bf16-mixed", HERE, False)],
)
def test_a_device_without_bfloat16_is_told(name: str, device: Device, lacks: bool) -> None:
    assert bool(list(precision_problems(name, device))) == lacks
