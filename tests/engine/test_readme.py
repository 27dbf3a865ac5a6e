"""What README.md and its guides say to type, typed: mistakes, choices, commands; and their files, written."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightswitch.config.overrides import GROUPS
from tests.engine.config.mistaken import answers, refused
from tests.engine.conftest import CHECKOUT, Train
from tests.engine.guide import commands, files, follow

DOCS, README_MD = CHECKOUT / "docs", CHECKOUT / "README.md"
README = README_MD.read_text()
RUNNING, YOUR_OWN_CODE = ((DOCS / name).read_text() for name in ("running.md", "your-own-code.md"))
ADD = YOUR_OWN_CODE.partition("\n## I have a LightningModule\n")[0]
COMMANDS = {command: page for page in (RUNNING, ADD, README) for command in commands(page)}
ERRORS = re.findall(r"^    \$ python (train\.py .*)\n    (error: .*)$", RUNNING, re.MULTILINE)


def test_the_first_screen_is_one() -> None:
    screen = README.partition("\n## ")[0]
    assert len(screen.splitlines()) <= 30
    assert commands_of_make(screen) == ["train", "test"]
    sentence, _ = screen.partition("\n\n")[2].split("\n\n", 1)
    assert sentence.count(".") == 1
    _, *rows = re.findall(r"^\| (?!---)(.*) \|$", screen, re.MULTILINE)
    assert len(rows) <= 12
    assert not [row for row in rows if re.search(r"[.;:](?: |$)", re.sub(r"\]\([^)]*\)", "]", row))]
    assert len(README.splitlines()) <= 90


def commands_of_make(page: str) -> list[str]:
    """Return the target of each command that a page shows with a remark of what it does and how long it takes."""
    return re.findall(r"^    make (\w+) +# .*\b(?:minute|hour)", page, re.MULTILINE)


def test_every_page_is_found_from_the_first() -> None:
    pages = {path.relative_to(CHECKOUT).as_posix() for path in DOCS.rglob("*.md")}
    assert pages - {*re.findall(r"\]\((docs/[^)#]+)", README)} == {"docs/index.md"}


def test_the_guides_are_read_as_they_are_written() -> None:
    assert len(ERRORS) == 3
    assert len(COMMANDS) >= 4
    assert commands(README)
    assert len(files(README)) == README.count("```python\n") + README.count("```yaml\n")
    assert len(files(ADD)) == ADD.count("```") / 2 == 4


def test_mistakes_are_told_as_the_guide_shows_them(tmp_path: Path) -> None:
    found = answers({command: shlex.split(command)[1:] for command, _ in ERRORS}, tmp_path)
    assert [(command, found[command].err.strip()) for command, _ in ERRORS] == ERRORS
    assert {answer.returncode for answer in found.values()} == {2}


@pytest.mark.parametrize(("command", "page"), COMMANDS.items(), ids=[*COMMANDS])
def test_their_commands_train(command: str, page: str, train: Train, tmp_path: Path) -> None:
    words = shlex.split(command.replace("trainer.devices=8", "trainer.devices=2"), comments=True)
    assert "step 2/2" in follow(words, page, tmp_path / "typed", train).out


# What only the page itself makes, or the reader has; flags; sweeps; and a choice that is named without what it needs
OF_THE_READER = re.compile(
    r"…|<|my\.|(^|\s)-|\b(mlp|stripes|listener|calls|mine|resnet|table|jsonl|all_reduce)\b|gpt_search|=ddp,|=hf_text$"
)
A_CHOICE = re.compile(rf"({'|'.join(GROUPS)})=[\w\[]")


def _typed(path: Path) -> Iterator[str]:
    """What a page says to type after `python train.py`, and what begins with a choice."""
    text = re.sub(r" *\\\n +", " ", path.read_text())
    lines = re.findall(r"^    (?:\$ )?python train\.py (.+)$(?!\n    error:)", text, re.MULTILINE)
    passing = re.findall(r"`(?:python train\.py )?([a-z]\w+=[^`\n]+)`", text)
    yield from (line for line in (*lines, *filter(A_CHOICE.match, passing)) if not OF_THE_READER.search(line))


def test_what_the_pages_say_to_type_is_taken(tmp_path: Path) -> None:
    elsewhere = ("your-own-code.md", "fork.md", "extension.md")  # which have tests of their own
    pages = [README_MD, *DOCS.glob("*.md"), *DOCS.glob("zh/*.md")]
    typed = dict.fromkeys(line for page in pages if page.name not in elsewhere for line in _typed(page))
    assert len(typed) >= 40
    assert refused(map(shlex.split, typed), tmp_path) == {}


def test_every_choice_is_in_the_guide() -> None:
    seen: set[str] = set()
    for group, row in re.findall(r"^\| (`[a-z`, ]+`) \| (.*) \|$", RUNNING, re.MULTILINE):
        names = re.findall(r"`([a-z0-9_]+)`", group)
        seen.update(names)
        files = {path.stem for name in names for path in (CHECKOUT / "conf" / name).glob("*.yaml")}
        told = set(re.findall(r"[a-z0-9_]+", row.replace("-", "_")))
        assert {file.replace("-", "_") for file in files} - told <= _TOLD_OTHERWISE, group
    assert {"model", "data", "precision"} <= seen


# switched on by `default` or a name that the row spells out in words
_TOLD_OTHERWISE = {"checkpoint", "progress", "lr_monitor", "model_summary", "csv", "tensorboard"}
