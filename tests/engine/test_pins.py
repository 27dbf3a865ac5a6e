"""What is installed is what was tested, to the byte."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.engine.conftest import CHECKOUT

PINS = (CHECKOUT / "constraints.txt").read_text()


def test_every_pin_but_torch_has_hashes() -> None:
    entries = re.split(r"\n(?=\S)", PINS.strip())
    assert entries.pop(0).startswith("# made by `make constraints`")
    assert [
        entry for entry in entries if not re.match(r"[\w.-]+==\S+( ;.*)? \\\n    --hash=sha256:[0-9a-f]{64}", entry)
    ] == [next(entry for entry in entries if entry.startswith("torch=="))]


def test_make_installs_nothing_by_name_alone_but_torch() -> None:
    planned = subprocess.check_output(
        ["make", "--dry-run", "--always-make", "--no-print-directory", ".venv/installed"], cwd=CHECKOUT, text=True
    )
    installs = [line for line in planned.splitlines() if "pip install" in line]
    unhashed = [line for line in installs if "--require-hashes --no-deps" not in line]
    assert len(installs) == 5
    assert [
        "^torch==" in line or line.endswith("--no-deps --no-build-isolation --editable .") for line in unhashed
    ] == [
        True,
        True,
    ]


@pytest.mark.parametrize("is_pinned", [False, True])
def test_another_file_of_the_same_name_is_refused(is_pinned: bool, tmp_path: Path) -> None:
    entry = re.search(r"^sniffio==(\S+) (\\\n    --hash=\S+ ?)+", PINS, re.MULTILINE)
    assert entry is not None
    version = entry[1]
    info = f"sniffio-{version}.dist-info"
    counterfeit = tmp_path / f"sniffio-{version}-py3-none-any.whl"
    with zipfile.ZipFile(counterfeit, "w") as wheel:
        wheel.writestr("sniffio.py", "print('harm')")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: sniffio\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    own = f"sniffio=={version} --hash=sha256:{hashlib.sha256(counterfeit.read_bytes()).hexdigest()}"
    (tmp_path / "pins.txt").write_text(own if is_pinned else entry[0])
    options = ("--isolated", "--no-index", "--find-links", str(tmp_path), "--target", str(tmp_path / "site"))
    pip = (sys.executable, "-m", "pip", "install", *options, "--require-hashes", "--no-deps", "-r", "pins.txt")
    done = subprocess.run(pip, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == (0 if is_pinned else 1), done.stderr
    assert ("DO NOT MATCH THE HASHES" in done.stderr) != is_pinned
    assert (tmp_path / "site" / "sniffio.py").exists() == is_pinned


def test_actions_are_pinned_by_commit() -> None:
    used = re.findall(r"uses: (.*)", "".join(path.read_text() for path in CHECKOUT.glob(".github/workflows/*.yml")))
    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v[\d.]+", action) for action in used)
