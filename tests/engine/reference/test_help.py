"""What --help says: all that can be typed on one screen, and more of a group or a choice."""

from __future__ import annotations

import itertools

import pytest

from lightswitch.config.overrides import asks_for_help
from lightswitch.errors import RefusedRequest
from lightswitch.reference.choices import config, groups, help_text, sentences
from tests.engine.conftest import CHECKOUT

TRAIN, CONF = CHECKOUT / "train.py", CHECKOUT / "conf"


def _text(about: str) -> str:
    return " ".join(help_text(about, TRAIN, CONF).split())


def test_all_of_it_fits_on_a_screen_and_leaves_out_no_group_and_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    lines = help_text("", TRAIN, CONF).splitlines()
    assert len(lines) < 65
    assert max(map(len, lines)) <= 120
    first = {line.strip().partition("=")[0].partition(".")[0] for line in lines if line.startswith("  ")}
    assert {*groups(CONF), *(key.path for key in config(CONF).keys if "." not in key.path)} <= first
    assert "Other:" not in lines


def test_a_group_shows_its_choices_with_their_sentences() -> None:
    for group, choices in groups(CONF).items():
        shown = _text(group)
        for choice in choices:
            assert f"{group}={choice.name}" in shown
            assert " ".join(choice.sentence.split()) in shown


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("--help optimizer=sgd", "optimizer.maximize=false"),  # of the code alone
        ("-h watch", "watch.lost_after_seconds=60 without a message from a rank; float or int"),
        ("--help seed", "seed=42 of initial weights, order of samples, augmentation and dropout; int"),
        ("--help optimizer.lr", "learning rate; float"),
        ("--help callbacks.last_checkpoint", "every_n_steps=250 optimizer steps between two checkpoints"),
        ("--help trainer.max_epochs", "Stop training once this number of epochs is reached; Optional[int]"),
    ],
)
def test_a_choice_a_node_or_a_key_is_told_by_itself(typed: str, told: str) -> None:
    assert told in _text(asks_for_help(typed.split()) or "")


@pytest.mark.parametrize(
    ("about", "told"),
    [
        ("fsdp_tp", "there is no group and no key fsdp_tp. Did you mean strategy=fsdp_tp?"),
        ("optimizer.lrr", "there is no group and no key optimizer.lrr. Did you mean optimizer.lr?"),
        ("strategy=fdsp", "strategy has no fdsp. Did you mean fsdp?"),
    ],
)
def test_what_is_not_there_is_refused_in_a_line(about: str, told: str) -> None:
    with pytest.raises(RefusedRequest) as refused:
        _text(about)
    assert refused.value.problems == [f"--help {about}: {told}"]


def test_each_key_that_can_be_typed_has_a_sentence() -> None:
    """But for those of a device's sheet, of peft, and of fsdp_tp's plans, which are named by the model's class."""
    keys = [key for choice in (config(CONF), *itertools.chain(*groups(CONF).values())) for key in choice.keys]
    told = sentences(CONF)
    mute = {key.path for key in keys if not key.is_node and not key.name.startswith("_") and key.path not in told}
    unnamed = ("plan.device.", "model.lora.", "trainer.strategy.plans.")
    assert [path for path in mute if not path.startswith(unnamed)] == []
