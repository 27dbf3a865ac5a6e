"""mode=check, as a user types it: the table, check.json, the exit code, and what it says of what can't be checked."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from lightswitch.checking.runs import Ended
from lightswitch.checking.table import PROMISES
from lightswitch.cluster.placement import Placement
from lightswitch.errors import Refused
from lightswitch.launch import promises
from tests.engine.requests import composed, composing, problems
from tests.runs import Finished, Train

DATA = ("data._target_=tests.engine.plain.PlainData", "data.samples=96", "global_batch_size=24")
CHECK = (*DATA, "mode=check", "run_id=mine", "trainer.devices=8")


def _module(name: str) -> str:
    return f"model._target_=tests.engine.checking.modules.{name}"


def _rows(finished: Finished) -> dict[str, list[str]]:
    """Return the words of each strategy's row of the table."""
    (found,) = re.findall(r"^(strategy .*\n(?:.+\n)+)\n", finished.out, re.MULTILINE)
    return {words[0]: words[1:] for words in map(str.split, found.splitlines())}


def test_a_good_module_keeps_all_promises(train: Train) -> None:
    finished = train(*CHECK, _module("Good"), "strategy=fsdp")
    rows, data = _rows(finished), json.loads((finished.run_dir / "check.json").read_text())
    assert list(rows) == ["strategy", "single", "fsdp"]
    assert rows["single"] == ["-"] * 6 + ["0", "0", "-", "yes"]
    assert len(data["ways"]["fsdp"]) == len(PROMISES) == len(rows["fsdp"])
    assert "DIFFERS" not in finished.out
    assert "holds      8 steps, 2 devices" in finished.out
    assert data["holds"]
    assert set(data["ways"]) == {"single", "fsdp"}
    assert 0 < data["ways"]["fsdp"]["parameters"]["largest"] < 1e-5
    assert data["ways"]["single"]["killed, resumed"]["largest"] == 0
    assert not list(finished.run_dir.glob("check_*")), "its runs are removed"


def test_what_differs_or_fails_is_told_with_its_moment_and_cause(train: Train) -> None:
    words = (_module("ReadsDice"), "check.strategies=[ddp,fsdp]", "check.steps=6")
    finished = train(*CHECK, *words, check=False)
    data, rows = json.loads((finished.run_dir / "check.json").read_text()), _rows(finished)
    assert finished.returncode == 1
    assert not data["holds"]
    assert rows["ddp"][0] == "DIFFERS"
    assert rows["fsdp"] == ["FAILED"] * 10
    assert "when       ddp: net.0.weight differs first, after step 1" in finished.out
    assert "cause      ddp: loss over the local batch. one process with the micro batches" in finished.out
    assert re.search(r"^failed     fsdp: RuntimeError: .*DTensor", finished.out, re.MULTILINE)
    assert "cause      fsdp: operation that the strategy can't do. fsdp raises RuntimeError" in finished.out
    assert {way: [cause["name"] for cause in causes] for way, causes in data["causes"].items()} == {
        "single": [], "ddp": ["loss over the local batch"], "fsdp": ["operation that the strategy can't do"]
    }  # fmt: skip


def test_a_logged_value_that_alone_differs_is_told_with_what_to_log(train: Train) -> None:
    finished = train(*CHECK, _module("LogsTheLargest"), "check.strategies=[ddp]", "check.steps=2", check=False)
    line = r"^differs    ddp, logged: train/largest after step 1: \S+; what is logged by step is the mean over devices"
    assert re.search(line, finished.out, re.MULTILINE), finished.out


def test_a_step_that_fails_in_one_process_is_the_modules_own(train: Train) -> None:
    finished = train(*CHECK, _module("Raises"), "strategy=ddp", check=False)
    assert finished.returncode == 1
    assert 'raise ValueError("the step of the user\'s own")' in finished.err
    assert "Raises fails in one process, before any strategy is tried: ValueError: the step" in finished.out
    assert not (finished.run_dir / "check.json").exists()


def test_a_run_that_ends_before_the_checked_steps_is_refused(train: Train) -> None:
    finished = train(*CHECK, _module("Good"), "check.strategies=[single,ddp]", "trainer.max_steps=3", check=False)
    line = "ended after 3 steps in one process, and check.steps=8; type a smaller check.steps, or a larger trainer.max_"
    assert (finished.returncode, line in finished.err) == (2, True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it trains")
def test_a_module_that_needs_gpus_is_refused_in_a_line_where_there_are_none(train: Train) -> None:
    run = train(*DATA, _module("OfGPUs"), check=False)  # as the check starts one
    cfg = OmegaConf.create({"model": {"_target_": _module("OfGPUs")}, "check": {"devices": 2}})
    with pytest.raises(Refused) as refused:
        promises._refuse(cfg, Ended(run.returncode, [], run.out + run.err, run.folder), on_gpus=False)
    assert "OfGPUs needs a GPU, and this machine has fewer than check.devices=2: " in str(refused.value)
    assert str(refused.value).endswith("; check it on a machine that has them")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("check.steps=0", "check.steps=0: use a number from 2"),
        ("check.devices=1", "check.devices=1: use a number from 2"),
        ("check.devices=many", "check.devices=many: use a number from 2"),
        ("check.strategies=[ddp,fsdb]", "check.strategies: there is no strategy fsdb. Did you mean fsdp?"),
        (
            "check.strategies=single",
            "check.strategies=single: single is what a strategy is compared with; name another",
        ),
        (
            "check.strategies=[]",
            "check.strategies=[]: single is what a strategy is compared with; name another, or all",
        ),
    ],
)
def test_a_mistake_is_told_before_anything_starts(words: str, line: str, tmp_path: Path) -> None:
    with composing():
        (found,) = problems(composed(*CHECK[:-2], words, _module("Good"), into=tmp_path))
    assert found.startswith(line)


def test_a_launcher_has_nothing_to_check(tmp_path: Path) -> None:
    with composing():
        (found,) = problems(composed("mode=check", into=tmp_path), Placement("torchrun", 1, 2))
    assert found.startswith("mode=check starts its own processes, but torchrun started several")
