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
    return help_text(about, TRAIN, CONF)


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        (["--help"], ""),
        (["-h", "strategy"], "strategy"),
        (["--help", "strategy=fsdp"], "strategy=fsdp"),
        (["strategy=ddp", "--help"], ""),
        (["strategy=ddp"], None),
        (["--hydra-help"], None),
    ],
)
def test_help_is_asked_for_by_a_flag(arguments: list[str], about: str | None) -> None:
    assert asks_for_help(arguments) == about


def test_all_of_it_fits_on_a_screen_and_leaves_out_no_group_and_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    lines = _text("").splitlines()
    assert len(lines) < 65
    assert max(map(len, lines)) <= 120
    first = {line.strip().partition("=")[0].partition(".")[0] for line in lines if line.startswith("  ")}
    assert set(groups(CONF)) <= first
    assert "Other:" not in lines
    assert {key.path for key in config(CONF).keys if "." not in key.path} <= first


@pytest.mark.parametrize("group", groups(CONF))
def test_a_group_shows_its_choices_with_their_sentences(group: str) -> None:
    shown = " ".join(_text(group).split())
    for choice in groups(CONF)[group]:
        assert f"{group}={choice.name}" in shown
        assert " ".join(choice.sentence.split()) in shown


def test_a_choice_shows_what_its_code_takes_as_well() -> None:
    shown = _text("optimizer=sgd")
    assert "optimizer.momentum=0.9" in shown
    assert "optimizer.maximize=false" in shown


@pytest.mark.parametrize(
    ("about", "told"),
    {
        "a node": ("watch", "watch.lost_after_seconds=60 without a message from a rank; float or int"),
        "a key": ("seed", "seed=42 of initial weights, order of samples, augmentation and dropout; int"),
        "of a choice": ("optimizer.lr", "learning rate; float"),
        "of a choice's part": (
            "callbacks.last_checkpoint",
            "every_n_steps=250 optimizer steps between two checkpoints",
        ),
        "of the code alone": (
            "trainer.max_epochs",
            "Stop training once this number of epochs is reached; Optional[int]",
        ),
    }.values(),
)
def test_a_node_or_a_key_is_told_by_itself(about: str, told: str) -> None:
    assert told in " ".join(_text(about).split())


def test_each_key_that_can_be_typed_has_a_sentence() -> None:
    """But for those of a device's sheet, of peft, and of fsdp_tp's plans, which are named by the model's class."""
    keys = [key for choice in (config(CONF), *itertools.chain(*groups(CONF).values())) for key in choice.keys]
    told = sentences(CONF)
    mute = {key.path for key in keys if not key.is_node and not key.name.startswith("_") and key.path not in told}
    assert {
        path for path in mute if not path.startswith(("plan.device.", "model.lora.", "trainer.strategy.plans."))
    } == set()


@pytest.mark.parametrize(
    ("about", "told"),
    [
        ("fsdp_tp", "--help fsdp_tp: there is no group and no key fsdp_tp. Did you mean strategy=fsdp_tp?"),
        ("stratgy", "--help stratgy: there is no group and no key stratgy. Did you mean strategy?"),
        (
            "optimizer.lrr",
            "--help optimizer.lrr: there is no group and no key optimizer.lrr. Did you mean optimizer.lr?",
        ),
        ("strategy=fdsp", "--help strategy=fdsp: strategy has no fdsp. Did you mean fsdp?"),
    ],
)
def test_what_is_not_there_is_refused_in_a_line(about: str, told: str) -> None:
    with pytest.raises(RefusedRequest) as refused:
        _text(about)
    assert refused.value.problems == [told]
