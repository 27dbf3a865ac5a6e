"""What README.md says can be typed, typed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.engine.conftest import CHECKOUT, Train

README = (CHECKOUT / "README.md").read_text()
SHORT = ("trainer.max_steps=2", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1")

COMMANDS = re.findall(r"^    python (train\.py .*)$", README, re.MULTILINE)
ERRORS = re.findall(r"^    \$ python (train\.py .*)\n    (error: .*)$", README, re.MULTILINE)
MODEL = re.search(r"```python\n# src/project/models/mlp\.py\n(.*?)```", README, re.DOTALL)


def test_the_readme_is_read_as_it_is_written() -> None:
    assert len(COMMANDS) >= 5
    assert len(ERRORS) == 3
    assert MODEL is not None


@pytest.mark.parametrize("command", [command for command in COMMANDS if "model=mlp" not in command])
def test_its_commands_train(command: str, train: Train) -> None:
    devices = re.search(r"trainer\.devices=(\d+)", command)  # of many, each would import all for itself
    finished = train(*shlex.split(command)[1:], *SHORT, ranks=int(devices[1]) if devices else 0)
    assert "test/loss" in finished.out


@pytest.mark.parametrize(("command", "error"), ERRORS)
def test_its_mistakes_are_told_as_it_shows_them(command: str, error: str, train: Train) -> None:
    finished = train(*shlex.split(command)[1:], check=False)
    assert finished.returncode == 2
    assert finished.err.strip() == error


def test_its_model_trains_from_two_files(train: Train, tmp_path: Path) -> None:
    assert MODEL is not None
    folder = tmp_path / "1"
    (folder / "conf" / "model").mkdir(parents=True)
    (folder / "readme_mlp.py").write_text(MODEL[1])
    config = re.search(r"```yaml\n# conf/model/mlp\.yaml\n(.*?)```", README, re.DOTALL)
    assert config is not None
    written = config[1].replace("project.models.mlp", "readme_mlp")
    (folder / "conf" / "model" / "mlp.yaml").write_text(written)
    run = train("model=mlp", "data=digits", *SHORT, "--config-dir", str(folder / "conf"), folder=folder)
    assert "MLP, 0.01 M parameters" in run.out


def test_its_choices_and_folders_are_there() -> None:
    seen: set[str] = set()
    for group, row in re.findall(r"^\| (`[a-z`, ]+`) \| (.*) \|$", README, re.MULTILINE):
        names = re.findall(r"`([a-z0-9_]+)`", group)
        if not all((CHECKOUT / "conf" / name).is_dir() for name in names):
            continue  # the table of strategies
        seen.update(names)
        files = {path.stem for name in names for path in (CHECKOUT / "conf" / name).glob("*.yaml")}
        told = set(re.findall(r"[a-z0-9_]+", row.replace("-", "_")))
        assert {file.replace("-", "_") for file in files} - told <= _TOLD_OTHERWISE, group
    assert {"model", "data", "precision"} <= seen
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [path for path in links if not (CHECKOUT / path).exists()] == []


# switched on by `default` or a name that the row spells out in words
_TOLD_OTHERWISE = {"checkpoint", "progress", "lr_monitor", "model_summary", "csv", "tensorboard"}
