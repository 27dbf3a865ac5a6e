"""What users of lightning-hydra-template type works, or a line says the name here: docs/reference/habits.md."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

import lightswitch
from tests.engine.config.habits import COMMANDS, LOADS, REFUSED, WORKS, words
from tests.engine.config.mistaken import refused
from tests.engine.config.template.mnist import MNISTLitModule, SimpleDenseNet
from tests.engine.conftest import CHECKOUT
from tests.engine.tables import habits
from tests.night import at_night

PAGE = (CHECKOUT / "docs" / habits.PAGE).read_text()
HELPS = re.compile(
    r"\b(type|use|did you mean|leave|set) |"
    r"\b(choices|expected|its own|its arguments|your own class|switch it on):? |no such file",
    re.IGNORECASE,
)


@pytest.mark.nightly  # a hundred commands
def test_the_page_has_what_each_gets_and_no_answer_is_bad(tmp_path: Path) -> None:
    lines = habits.refusals(tmp_path)
    assert [typed for typed, line in lines.items() if not HELPS.search(line)] == []
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    assert rows == habits.table(lines)[2:], "run python -m tests.engine.tables.habits"
    assert len(rows) == len(REFUSED) + len(COMMANDS) + len(WORKS) + len(LOADS) >= 100  # none is there twice


def test_what_works_is_taken(tmp_path: Path) -> None:
    assert refused(map(shlex.split, WORKS), tmp_path, before=words("")) == {}


@pytest.mark.parametrize("typed", at_night(*WORKS))
def test_what_works_trains(typed: str, tmp_path: Path) -> None:
    run = habits.ran(typed, tmp_path)
    assert run.returncode == 0, run.out + run.err
    assert "Traceback" not in run.err


def test_a_run_is_loaded_by_its_file_and_tells_no_file_that_it_has_not(tmp_path: Path) -> None:
    run = habits.ran("logger=tensorboard", tmp_path)
    left_out = "hyper_parameters.optimizer, hyper_parameters.scheduler: a partial can't be read back safely"
    assert f"checkpoints leave out {left_out}\n" in run.out
    told = re.findall(r"^(metrics|go on|evaluate|look|weights) ", run.out, re.MULTILINE)
    assert told == ["go on", "evaluate", "look", "weights"]
    sizes = {"lin1_size": 64, "lin2_size": 128}  # what is no plain value is the caller's
    model = MNISTLitModule.load_from_checkpoint(
        run.run_dir / "model.ckpt", net=SimpleDenseNet(**sizes), optimizer=None, scheduler=None
    )
    expected = lightswitch.load(run.run_dir).net
    assert all(map(torch.equal, model.net.parameters(), expected.parameters()))
