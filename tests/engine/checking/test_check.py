"""mode=check, as a user types it: the table, check.json, the exit code, and what it says of what can't be checked."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lightswitch.checking.table import PROMISES
from lightswitch.cluster.placement import Placement
from tests.engine.requests import composed, composing, problems
from tests.runs import Finished, Train

DATA = ("data._target_=tests.engine.plain.PlainData", "data.samples=96", "global_batch_size=24")
CHECK = (*DATA, "mode=check", "run_id=mine", "trainer.devices=8")


def _module(name: str) -> str:
    return f"model._target_=tests.engine.checking.modules.{name}"


def _rows(finished: Finished) -> dict[str, list[str]]:
    """Return the words of each row of the table, by promise."""
    header, *_ = re.findall(r"^promise .*$", finished.out, re.MULTILINE)
    lines = {name: re.search(rf"^{name}  (.*)$", finished.out, re.MULTILINE) for name in PROMISES}
    return {"promise": header.split()[1:]} | {name: found[1].split() for name, found in lines.items() if found}


def test_a_good_module_keeps_all_promises(train: Train) -> None:
    finished = train(*CHECK, _module("Good"), "strategy=fsdp")
    rows, data = _rows(finished), json.loads((finished.run_dir / "check.json").read_text())
    assert rows.keys() == {"promise", *PROMISES}
    assert rows["promise"] == ["single", "fsdp"]
    assert "DIFFERS" not in finished.out
    assert "holds      8 steps, 2 devices" in finished.out
    assert data["holds"]
    assert set(data["ways"]) == {"single", "fsdp"}
    assert 0 < data["ways"]["fsdp"]["parameters"]["largest"] < 1e-5
    assert data["ways"]["single"]["killed, resumed"]["largest"] == 0
    assert sorted(path.name for path in finished.run_dir.iterdir()) == [".lock", "check.json", "train.log"]


def test_what_differs_is_told_with_its_moment_and_cause(train: Train) -> None:
    finished = train(*CHECK, _module("Dice"), "check.strategies=[ddp]", "check.steps=2", check=False)
    data = json.loads((finished.run_dir / "check.json").read_text())
    assert finished.returncode == 1
    assert not data["holds"]
    assert _rows(finished)["train/loss"][1] == "DIFFERS"
    assert "when       ddp: net.0.weight differs first, after step 1" in finished.out
    assert "cause      ddp: loss over the local batch" in finished.out
    assert [cause["name"] for cause in data["causes"]["ddp"]] == ["loss over the local batch"]


def test_a_strategy_that_is_refused_or_fails_is_told_in_its_line(train: Train) -> None:
    finished = train(*CHECK, _module("Reads"), "check.strategies=[fsdp,fsdp_hybrid]", "check.steps=2", check=False)
    assert finished.returncode == 1
    assert re.search(r"^failed     fsdp: RuntimeError: .*DTensor", finished.out, re.MULTILINE)
    assert "cause      fsdp: operation that the strategy can't do" in finished.out
    assert re.search(r"^(refused|failed)    +fsdp_hybrid: ", finished.out, re.MULTILINE)


def test_a_step_that_fails_in_one_process_is_the_modules_own(train: Train) -> None:
    finished = train(*CHECK, _module("Raises"), "strategy=ddp", check=False)
    assert finished.returncode == 1
    assert 'raise ValueError("the step of the user\'s own")' in finished.err
    assert "Raises fails in one process, before any strategy is tried: ValueError: the step" in finished.out
    assert not (finished.run_dir / "check.json").exists()


def test_a_module_that_needs_gpus_is_told_in_a_line(train: Train) -> None:
    finished = train(*CHECK, _module("NeedsCuda"), "strategy=ddp", check=False)
    (line,) = finished.err.splitlines()
    assert finished.returncode == 2
    assert line.startswith("error: tests.engine.checking.modules.NeedsCuda needs a GPU, and this machine has fewer")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("check.steps=0", "check.steps=0: use a number from 2"),
        ("check.devices=1", "check.devices=1: use a number from 2"),
        ("check.devices=many", "check.devices=many: use a number from 2"),
        ("check.strategies=[ddp,fsdb]", "check.strategies: there is no strategy fsdb. Did you mean fsdp?"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(words: str, line: str, tmp_path: Path) -> None:
    with composing():
        (found,) = problems(composed(*CHECK[:-2], words, _module("Good"), into=tmp_path))
    assert found.startswith(line)


def test_a_launcher_has_nothing_to_check(tmp_path: Path) -> None:
    with composing():
        (found,) = problems(composed("mode=check", into=tmp_path), Placement("torchrun", 1, 2))
    assert found.startswith("mode=check starts its own processes, and torchrun started this one")
