"""What is refused by train.py: one line for each mistake, exit code 2, those of keys before torch is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError

from lightswitch.config import aliases, hydra_errors
from lightswitch.config.hydra_versions import VERSION
from tests.engine.config.habits import GUIDES_CHOICES, as_in_a_shell
from tests.engine.config.mistaken import Answer, answers
from tests.engine.conftest import CHECKOUT, PLAIN

IS_HYDRA_1_3 = bool(VERSION)
TABLE = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text())


def _choices(group: str) -> str:
    return ", ".join(sorted(path.stem for path in (CHECKOUT / "conf" / group).glob("*.yaml")))


def _lines(told: str | list[str]) -> str:
    return "\nerror: ".join([told] if isinstance(told, str) else told).replace("{strategies}", _choices("strategy"))


MISTAKES = {typed: _lines(told) for typed, told in (TABLE["commands"] | TABLE["later"]).items()} | {
    "~init_from": "~init_from: there is no such key, or it is null already; leave that out"
    if IS_HYDRA_1_3
    else "init_from: the config has no such key, and the engine reads it; add it to config.yaml",
}
# What a file of the config may hold, and the line
FILES = {
    "bracket": (b"x: 1\nsizes: [1, 2\n", "PATH, line 3, column 1: while parsing a flow sequence, "),
    "colon": (b"_target_: my.Data: 3\n", "PATH, line 1, column 18: mapping values are not allowed "),
    "tab": (b"x:\n\ty: 1\n", "PATH, line 2, column 1: while scanning for the next token, found character "),
    "twice": (b"x: 1\nx: 2\n", "PATH, line 2, column 1: while constructing a mapping, found duplicate key x"),
    "latin": ("name: Größe\n".encode("latin-1"), "a config file is not text in UTF-8: 'utf-8' codec can't decode "),
    "nothing": (b"x: 1\n", "data: it names no class; type data._target_=my.Class, or choose another config\n"),
}

pytestmark = pytest.mark.timeout(3600)  # the first waits for all answers, 25 s of CPU


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    commands = {typed: as_in_a_shell(typed) for typed in MISTAKES}
    (mine := tmp_path_factory.mktemp("mine") / "data").mkdir()
    for name, (content, _) in FILES.items():
        (mine / f"{name}.yaml").write_bytes(content)
        commands[f"file {name}"] = ["--config-dir", str(mine.parent), PLAIN[0], f"data={name}"]
    commands |= {"--help": ["--help"], "--cfg": ["strategy=ddp", "--cfg", "job"]}
    return answers(commands, tmp_path_factory.mktemp("mistaken"))


@pytest.mark.parametrize("typed", MISTAKES, ids=lambda typed: typed[:100])
def test_a_mistake_is_told_in_a_line_before_torch_is_imported(typed: str, answered: dict[str, Answer]) -> None:
    imported = ["lightning", "torch"] if typed in TABLE["later"] else []
    assert answered[typed] == Answer(2, "", f"error: {MISTAKES[typed]}\n", imported, left=[])


def test_a_file_of_the_config_that_cannot_be_used_is_named_with_its_line(answered: dict[str, Answer]) -> None:
    for name, (_, line) in FILES.items():
        answer = answered[f"file {name}"]
        assert re.sub(rf"/\S+/data/{name}\.yaml", "PATH", answer.err).startswith(f"error: {line}")
        assert (answer.err.count("\n"), answer.returncode, answer.imported, answer.left) == (1, 2, [], []), name


def test_help_and_the_config_are_shown_without_torch(answered: dict[str, Answer]) -> None:
    for typed, shown in {"--help": "python train.py strategy=ddp", "--cfg": "lightswitch.strategies.ddp.DDP"}.items():
        answer = answered[typed]
        assert (answer.returncode, answer.err, answer.imported, answer.left) == (0, "", [], [])
        assert shown in answer.out
    assert " ".join(answered["--help"].out.split()).count(_choices("strategy").replace(",", "")) == 1


def test_help_that_is_read_in_part_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as unread:
        command = [sys.executable, "train.py", "--help"]
        shown = subprocess.run(command, stdout=unread, stderr=subprocess.PIPE, cwd=CHECKOUT)
    assert (shown.returncode, shown.stderr) == (0, b"")


def test_a_choice_that_is_not_there_is_told_with_the_one_that_was_meant() -> None:
    """As Hydra raises it, whose own errors MISTAKES has."""
    expected = {f"{one}": f". Did you mean {meant}? Choices: " for one, meant in TABLE["meant"].items()}
    expected |= {one: ". Choices: " for one in TABLE["unmeant"]} | GUIDES_CHOICES
    expected["hydra/sweeper=optuna"] = "its package is not installed; type pip install -e '.[optuna]'"
    for typed, text in expected.items():
        group, _, choice = typed.partition("=")
        missing = MissingConfigException("", f"{group}/{choice}", _choices(group).split(", "))
        (line,) = hydra_errors.problems_of_composition(missing)
        assert line.startswith(f"{typed}: ")
        assert text in line


def test_a_key_that_is_not_there_is_told_with_the_one_that_was_meant() -> None:
    with initialize_config_dir(str(CHECKOUT / "conf"), version_base="1.3"):
        cfg = compose("config", [*PLAIN])
    for key, line in TABLE["keys"].items():
        with pytest.raises(ConfigAttributeError) as lacks:
            OmegaConf.update(cfg, key, 3)
        error = ConfigCompositionException()
        error.__cause__ = lacks.value
        assert hydra_errors.problems_of_composition(error) == [line]


def test_a_word_stands_in_the_table_once() -> None:
    words = Counter(word for words in aliases._WORDS.values() for word in words.split())
    assert [word for word, times in words.items() if times > 1] == []
