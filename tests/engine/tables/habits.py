"""What comes of a hundred habits of lightning-hydra-template's users.

python -m tests.engine.tables.habits            # types each, for measured/habits.md; two minutes
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.engine.config.habits import COMMANDS, LOADS, REFUSED, WORKS, words
from tests.engine.config.mistaken import answers
from tests.engine.conftest import CHECKOUT
from tests.engine.tables import documents
from tests.runs import Finished, runs_in

PAGE, HEAD = "habits", ["typed", "here"]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        lines = refusals(Path(folder))
        for typed in WORKS:
            run = ran(typed, Path(folder))
            assert run.returncode == 0, f"{typed}\n{run.out}{run.err}"
    documents.put(PAGE, table(lines))


def table(lines: dict[str, str]) -> list[str]:
    """The rows of the page, of refusals by what was typed."""
    told = {typed: f"`{line}`" for typed, line in lines.items()} | {
        typed: f"works: {does}" for typed, does in (WORKS | LOADS).items()
    }
    return documents.markdown(HEAD, [[f"`{typed}`", here] for typed, here in told.items()])


def refusals(folder: Path) -> dict[str, str]:
    """The line that each is refused with, by what was typed."""
    found = answers({typed: words(typed) for typed in REFUSED}, folder)
    lines = {typed: (answer.returncode, answer.err) for typed, answer in found.items()}
    lines |= {command: _told(command) for command in COMMANDS}
    return {typed: _line(typed, *answer) for typed, answer in lines.items()}


def _told(command: str) -> tuple[int, str]:
    environ = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command.split(), cwd=CHECKOUT, env=environ, capture_output=True, text=True)
    told = done.stderr.splitlines()[0] + "\n" if command.startswith("make ") else done.stderr  # make adds a line
    return done.returncode, told


def _line(typed: str, code: int, told: str) -> str:
    line = told.removeprefix("error: ")
    assert (code, line.count("\n")) == (2, 1), f"{typed}: {code}\n{told}"
    return line.rstrip("\n").replace(str(CHECKOUT), "…")


def ran(typed: str, folder: Path) -> Finished:
    """The run of what works, an epoch of it."""
    short = [] if "max_epochs" in typed else ["trainer.max_epochs=1"]
    where = folder / f"runs{len(list(folder.iterdir()))}"
    where.mkdir()
    return runs_in(where)(*words(typed), *short, check=False)


if __name__ == "__main__":
    main()
