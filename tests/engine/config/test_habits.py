"""What users of lightning-hydra-template and readers of guides type works, or a line says what to type here."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from hydra.errors import MissingConfigException

import lightswitch
from lightswitch.config.hydra_errors import problems_of_composition
from tests.engine.config.habits import (
    COMMANDS,
    GUIDES,
    GUIDES_ALONE,
    GUIDES_CHOICES,
    GUIDES_WORK,
    LOADS,
    REFUSED,
    WORKS,
    words,
)
from tests.engine.config.mistaken import answers, refused
from tests.engine.config.template.mnist import MNISTLitModule, SimpleDenseNet
from tests.engine.conftest import CHECKOUT, PLAIN
from tests.engine.tables import habits
from tests.night import at_night

CONF = CHECKOUT / "conf"
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


def test_each_word_of_a_guide_is_answered_with_what_to_type(tmp_path: Path) -> None:
    typed = {before: [*PLAIN, *before.split(), *GUIDES[before]] for before in GUIDES}
    typed |= {alone: _with_variables_first(alone) for alone in GUIDES_ALONE}
    found = answers(typed, tmp_path)
    assert {name: answer.returncode for name, answer in found.items() if answer.returncode != 2} == {}
    expected = [(before, word.partition("=")[0], text) for before in GUIDES for word, text in GUIDES[before].items()]
    expected += [(alone, "", text) for alone, text in GUIDES_ALONE.items()]
    advice = found["NCCL_TIMEOUT=3600 strategy=ddp trainer.strategy.process_group_backend=nccl"].out
    assert "advice     NCCL_TIMEOUT has no effect; type trainer.strategy.timeout_seconds=3600" in advice
    assert [(before, key, text) for before, key, text in expected if not _says(found[before].err, key, text)] == []


def _with_variables_first(typed: str) -> list[str]:
    ours = shlex.split(typed)
    variables = [word for word in ours if re.match("[A-Z_]+=", word)]
    return [*variables, *PLAIN, *(word for word in ours if word not in variables)]


def _says(lines: str, key: str, text: str) -> bool:
    """Return whether a line about this key, or about the node that lacks it, has the text."""
    keys = (f"error: {key}:", f"error: {key.partition('.')[0]}:") if key else ("error: ",)
    return any(line.startswith(keys) and text in line for line in lines.splitlines())


def test_each_choice_of_a_guide_is_answered_with_what_to_type() -> None:
    """As Hydra raises it."""
    for typed, text in GUIDES_CHOICES.items():
        group, _, choice = typed.partition("=")
        missing = MissingConfigException("", f"{group}/{choice}", [one.stem for one in (CONF / group).glob("*.yaml")])
        (line,) = problems_of_composition(missing)
        assert line.startswith(f"{typed}: there is no ")
        assert text in line


def test_what_guides_name_and_works_here_is_taken(tmp_path: Path) -> None:
    variables = [_with_variables_first(typed) for typed in GUIDES_WORK]
    told = "error: meet_timeout_seconds=x: found str, expected float or int\n"
    found = answers({" ".join(one): [*one, "meet_timeout_seconds=x"] for one in variables}, tmp_path)
    assert {line: answer.err for line, answer in found.items() if answer.err != told} == {}


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
