"""docs/tutorial.md, followed: a fork is made, its files are written, and each command is typed in turn."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.engine.conftest import CHECKOUT
from tests.engine.fork.forks import clone_into, environment, made, run

TUTORIAL = (CHECKOUT / "docs" / "tutorial.md").read_text()
FILES = re.findall(r"^```\w+\n# ((?:src|conf)/\S+)\n(.*?)^```", TUTORIAL, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(
    r"^    (\S.*)$", re.sub(r"^```.*?^```", "", TUTORIAL, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
)
ELSEWHERE = {  # tried by others: tests/engine/fork makes forks and runs their make, tests/engine/slurm submits
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
    "python train.py mode=plan": r"take       ddp, micro batch 8",
    "python train.py -m": r"1e-3.*\n.*1e-2|0\.001.*\n.*0\.01",
    "python -c": r"Listener\(",
}


def test_every_command_is_typed_here_or_elsewhere() -> None:
    assert set(COMMANDS) >= ELSEWHERE
    assert len(COMMANDS) - len(ELSEWHERE) >= 8
    assert all(any(command.startswith(beginning) for command in COMMANDS) for beginning in TOLD)


@pytest.mark.timeout(600)
def test_its_commands_do_in_turn_what_it_says(tmp_path: Path) -> None:
    fork = made(clone_into(tmp_path / "lightswitch"), tmp_path / "birdsong", "--bare")
    environment(fork, "--editable", ".")
    for path, text in FILES:
        (fork / path).write_text(text)
    for command in COMMANDS:
        if command not in ELSEWHERE:
            words = [".venv/bin/python" if word == "python" else word for word in shlex.split(command)]
            told = run(words, fork)
            for beginning, expected in TOLD.items():
                assert not command.startswith(beginning) or re.search(expected, told), told
