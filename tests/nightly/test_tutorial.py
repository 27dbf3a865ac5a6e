"""docs/tutorial.md, followed: its files are written, and each of its commands is typed in turn."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.engine.conftest import CHECKOUT, Train

TUTORIAL = (CHECKOUT / "docs" / "tutorial.md").read_text()
FILES = re.findall(r"^```\w+\n# (?:src/)?(\S+)\n(.*?)^```", TUTORIAL, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(
    r"^    (\S.*)$", re.sub(r"^```.*?^```", "", TUTORIAL, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
)
ELSEWHERE = {  # tried by others: tests/nightly/fork makes forks and runs their make, tests/engine/slurm submits
    "make fork NAME=birdsong INTO=../birdsong ARGS=--bare",
    "cd ../birdsong",
    "make train",
    "source .venv/bin/activate",
    "make test",
    "sbatch --nodes=4 --gpus-per-node=8 slurm/multinode.sh model=listener data=calls strategy=fsdp",
}
TOLD = {  # of a command, by its beginning
    "python train.py model=listener data=calls trainer.max_steps=250 run_id=first": r"val/right 0\.9\d",
    "python train.py model=listener data=calls trainer.max_steps=350": r"resumes .*, at step 250",
    "python -m lightswitch.compare": r"train/loss differs by \d(\.\d+)?e-0[789] at most",
    "python train.py mode=plan": r"take       ddp, 32-true, micro batch 8",  # of a step of microseconds, the simplest
    "python train.py -m": r"lr=0\.001 +0\.7\d+ +finished.*\n.*lr=0\.01 +0\.0\d+ +finished",
    "python -c": r"Listener\(",
}


def test_every_command_is_typed_here_or_elsewhere() -> None:
    assert len(COMMANDS) - len(ELSEWHERE) >= 8
    assert all(any(command.startswith(beginning) for command in COMMANDS) for beginning in TOLD)


def test_its_commands_do_in_turn_what_it_says(train: Train, tmp_path: Path) -> None:
    """In a folder with the package and the configs that a fork would have them in."""
    for path, text in FILES:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "exports").mkdir()
    (tmp_path / "exports" / "runs").symlink_to(tmp_path / "runs")
    for command in COMMANDS:
        if command not in ELSEWHERE:
            told = _typed(shlex.split(command), train, tmp_path)
            for beginning, expected in TOLD.items():
                assert not command.startswith(beginning) or re.search(expected, told), told


def _typed(words: list[str], train: Train, folder: Path) -> str:
    environment = {"PYTHONPATH": f"{CHECKOUT / 'src'}:{folder}", "PATH": "", "HOME": str(folder)}
    if words[:2] == ["python", "train.py"]:
        ranks, configs = 2 if "trainer.devices=2" in words else 0, ("--config-dir", str(folder / "conf"))
        return train(*words[2:], *configs, folder=folder, ranks=ranks, environment=environment).out
    # beside the weights, where nobody takes code from unasked, there is no package
    exports = folder / "exports"
    return subprocess.run(
        [sys.executable, *words[1:]], cwd=exports, env=environment, capture_output=True, text=True, check=True
    ).stdout
