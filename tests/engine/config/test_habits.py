"""What users of lightning-hydra-template and readers of guides type works, or a line says what to type here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import lightswitch
from tests.engine.config.habits import COMMANDS, GUIDES, GUIDES_ALONE, GUIDES_WORK, LOADS, REFUSED, WORKS, as_in_a_shell
from tests.engine.config.mistaken import answers
from tests.engine.config.template.mnist import MNISTLitModule, SimpleDenseNet
from tests.engine.conftest import Train
from tests.engine.tables import habits
from tests.engine.tables.documents import MEASURED
from tests.night import at_night

PAGE = (MEASURED / f"{habits.PAGE}.md").read_text()
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


@pytest.mark.parametrize("before", GUIDES)
def test_each_word_of_a_guide_is_answered_with_what_to_type(before: str, train: Train) -> None:
    answer = train(*as_in_a_shell(before), *GUIDES[before], check=False)
    assert answer.returncode == 2
    for word, text in GUIDES[before].items():
        key = word.partition("=")[0]  # a line is about it, or about the node that lacks it
        lines = [
            line for line in answer.err.splitlines() if re.match(rf"error: {key}:|error: {key.split('.')[0]}:", line)
        ]
        assert any(text in line for line in lines), f"{word}: {answer.err}"


@pytest.mark.nightly
def test_each_command_of_a_guide_is_answered_with_what_to_type(tmp_path: Path) -> None:
    found = answers({typed: as_in_a_shell(typed) for typed in GUIDES_ALONE}, tmp_path)
    for typed, text in GUIDES_ALONE.items():
        assert found[typed].returncode == 2, typed
        assert re.search(rf"^error: .*{re.escape(text)}", found[typed].err, re.MULTILINE), (
            f"{typed}: {found[typed].err}"
        )
    advice = "advice     NCCL_TIMEOUT has no effect; type trainer.strategy.timeout_seconds=3600"
    assert advice in next(answer.out for typed, answer in found.items() if typed.startswith("NCCL_TIMEOUT"))


@pytest.mark.nightly
def test_what_guides_name_and_works_here_is_taken(tmp_path: Path) -> None:
    told = "error: meet_timeout_seconds=x: found str, expected float or int\n"  # and nothing else is wrong
    found = answers({typed: [*as_in_a_shell(typed), "meet_timeout_seconds=x"] for typed in GUIDES_WORK}, tmp_path)
    assert {typed: answer.err for typed, answer in found.items() if answer.err != told} == {}


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
