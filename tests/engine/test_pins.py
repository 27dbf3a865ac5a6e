"""What is installed is what was tested, to the byte."""

from __future__ import annotations

import re
import subprocess

import pytest

from lightswitch.patches import SUPPORTED
from tests.engine.conftest import CHECKOUT

PINS = (CHECKOUT / "constraints.txt").read_text()
LOWEST = (CHECKOUT / "constraints-lowest.txt").read_text()
VENVS = (".venv", ".venv-lowest")


@pytest.mark.parametrize("pins", [PINS, LOWEST], ids=VENVS)
def test_every_pin_but_torch_has_hashes(pins: str) -> None:
    entries = re.split(r"\n(?=\S)", pins.strip())
    assert entries.pop(0).startswith("# made by `make constraints`")
    assert [
        entry for entry in entries if not re.match(r"[\w.-]+==\S+( ;.*)? \\\n    --hash=sha256:[0-9a-f]{64}", entry)
    ] == [next(entry for entry in entries if entry.startswith("torch=="))]


def test_the_lowest_pins_are_the_lower_bounds() -> None:
    for package, bounds in SUPPORTED.items():
        pinned, *_ = re.findall(rf"^{package}==(\S+)", LOWEST, re.MULTILINE)
        lowest = bounds.partition(",")[0].removeprefix(">=")
        assert re.fullmatch(rf"{re.escape(lowest)}(\.0)*", pinned)


@pytest.mark.parametrize("venv", VENVS)
def test_make_installs_nothing_by_name_alone_but_torch(venv: str) -> None:
    command = ["make", "--dry-run", "--always-make", "--no-print-directory", f"{venv}/installed"]
    planned = subprocess.check_output(command, cwd=CHECKOUT, text=True)
    installs = [line for line in planned.splitlines() if "pip install" in line]
    unhashed = [line for line in installs if "--require-hashes --no-deps" not in line]
    assert len(installs) == 5
    assert all(f"{venv}/bin/python -m pip" in line for line in installs)
    assert len(unhashed) == 2
    assert all("^torch==" in line or line.endswith("--no-build-isolation --editable .") for line in unhashed)


def test_a_wheelhouse_is_filled_by_the_hashes_and_then_nothing_else_is_asked() -> None:
    """All of it, in a bare root without a network: tests/nightly/slurm/test_without_internet.py."""
    planned = subprocess.check_output(["make", "--dry-run", "wheelhouse"], cwd=CHECKOUT, text=True)
    downloads = [line for line in planned.splitlines() if "pip download" in line]
    assert ["--require-hashes --no-deps" in line for line in downloads] == [True, False]
    assert "grep '^torch=='" in downloads[1]
    shows = ["make", "--silent", "--eval=shown: ; @env", "shown", "WHEELHOUSE=wheelhouse"]
    exported = subprocess.check_output(shows, cwd=CHECKOUT, text=True).splitlines()
    assert {"PIP_NO_INDEX=1", f"PIP_FIND_LINKS={CHECKOUT}/wheelhouse"} <= {*exported}


def test_actions_are_pinned_by_commit() -> None:
    used = re.findall(r"uses: (.*)", "".join(path.read_text() for path in CHECKOUT.glob(".github/workflows/*.yml")))
    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v[\d.]+", action) for action in used)
