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


@pytest.mark.nightly
def test_what_differs_is_told_with_its_moment_and_cause(train: Train) -> None:
    finished = train(*CHECK, _module("Dice"), "check.strategies=[ddp]", "check.steps=2", check=False)
    data, rows = json.loads((finished.run_dir / "check.json").read_text()), _rows(finished)
    assert (finished.returncode, data["holds"], rows["ddp"][0]) == (1, False, "DIFFERS")
    assert "when       ddp: net.0.weight differs first, after step 1" in finished.out
    assert "cause      ddp: loss over the local batch. one process with the micro batches" in finished.out
    causes = {way: [cause["name"] for cause in found] for way, found in data["causes"].items()}
    assert causes == {"single": [], "ddp": ["loss over the local batch"]}


@pytest.mark.nightly
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


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("module", "words", "code", "told"),
    [
        (
            "ReadsDice",
            "check.strategies=[ddp,fsdp] check.steps=6",
            1,
            [
                r"^fsdp( +FAILED){10}",
                r"^failed     fsdp: RuntimeError: .*DTensor",
                "^cause      fsdp: operation that the strategy can't do. fsdp raises RuntimeError",
            ],
        ),
        (
            "LogsTheLargest",
            "check.strategies=[ddp] check.steps=2",
            1,
            [r"^differs    ddp, logged: train/largest after step 1: \S+; what is logged by step is the mean over dev"],
        ),
        (
            "Raises",
            "strategy=ddp",
            1,
            [
                'raise ValueError\\("the step of the user\'s own"\\)',
                "Raises fails in one process, before any strategy is tried: ValueError: the step",
            ],
        ),
        (
            "Good",
            "check.strategies=[single,ddp] trainer.max_steps=3",
            2,
            ["ended after 3 steps in one process, and check.steps=8; type a smaller check.steps, or a larger trainer."],
        ),
    ],
)
def test_what_fails_or_can_not_be_checked_is_told(
    module: str, words: str, code: int, told: list[str], train: Train
) -> None:
    finished = train(*CHECK, _module(module), *words.split(), check=False)
    assert finished.returncode == code
    for line in told:
        assert re.search(line, finished.out + finished.err, re.MULTILINE), finished.out + finished.err


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="there it trains")
def test_a_module_that_needs_gpus_is_refused_in_a_line_where_there_are_none(train: Train) -> None:
    run = train(*DATA, _module("OfGPUs"), check=False)  # as the check starts one
    cfg = OmegaConf.create({"model": {"_target_": _module("OfGPUs")}, "check": {"devices": 2}})
    with pytest.raises(Refused) as refused:
        promises._refuse(cfg, Ended(run.returncode, [], run.out + run.err, run.folder), on_gpus=False)
    assert "OfGPUs needs a GPU, and this machine has fewer than check.devices=2: " in str(refused.value)
    assert str(refused.value).endswith("; check it on a machine that has them")


def test_a_mistake_is_told_before_anything_starts(tmp_path: Path) -> None:
    expected = {
        "check.steps=0": "check.steps=0: use a number from 2",
        "check.devices=many": "check.devices=many: use a number from 2",
        "check.strategies=[ddp,fsdb]": "check.strategies: there is no strategy fsdb. Did you mean fsdp?",
        "check.strategies=[]": "check.strategies=[]: single is what a strategy is compared with; name another, or all",
    }
    with composing():
        for words, line in expected.items():
            (found,) = problems(composed(*CHECK[:-2], words, _module("Good"), into=tmp_path))
            assert found.startswith(line)
        (found,) = problems(composed("mode=check", into=tmp_path), Placement("torchrun", 1, 2))
    assert found.startswith("mode=check starts its own processes, but torchrun started several")
