"""What docs/debugging.md says can be typed, typed."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.engine.conftest import CHECKOUT, PLAIN, Train, runs_in

PAGE = (CHECKOUT / "docs" / "debugging.md").read_text()
COMMANDS = re.findall(r"^    (?:RANK=0 )?python (?:-m pdb -c continue )?train\.py (.*)$", PAGE, re.MULTILINE)
SNIPPET = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
SHORT = (
    *PLAIN,
    *("name=gpt", "trainer.max_steps=4", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1"),
    *("global_batch_size=64", "trainer.accelerator=cpu"),
)


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `runs/gpt/mine`."""
    folder = tmp_path_factory.mktemp("debugging")
    runs_in(folder)("run_id=mine", *SHORT, "trainer.max_steps=2", folder=folder)
    return folder


def test_the_page_has_commands_and_a_snippet() -> None:
    assert len(COMMANDS) >= 10
    assert SNIPPET is not None


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_do_what_they_say(command: str, mine: Path, train: Train, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    shutil.copytree(mine / "runs", folder / "runs")
    words = shlex.split(command)
    if "--cfg" in words:
        assert "lightswitch.strategies.fsdp.FSDP" in train(*words, folder=folder).out
        return
    ranks = 2 if "strategy=ddp" in words else 0
    kept = [word for word in words if word != "cluster=env"]  # as torchrun starts them here
    finished = train(*kept, *SHORT, ranks=ranks, folder=folder)
    assert "test/loss" in finished.out


def test_its_snippet_computes_the_loss_of_some_samples(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SNIPPET is not None
    monkeypatch.chdir(mine)
    found: dict[str, object] = {}
    exec(SNIPPET[1], found)
    assert float(found["loss"]) > 0  # type: ignore[arg-type]
