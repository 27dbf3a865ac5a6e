"""The benchmarks, the GPU's tests and the guides' code begin at least; tests/nightly takes them through."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.engine.conftest import CHECKOUT
from tests.nightly.test_images_and_tables import FILES as PAGE_OF_IMAGES
from tests.nightly.test_tutorial import COMMANDS, ELSEWHERE, FILES


@pytest.mark.nightly
def test_a_benchmark_measures_something(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks.streams", "--quick", "--out", str(out)]
    subprocess.run(command, cwd=CHECKOUT, capture_output=True, check=True)
    assert all(row["milliseconds"] > 0 for row in json.loads(out.read_text())["rows"])


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_make_says_what_it_does_not_run(tmp_path: Path) -> None:
    """With any Python that is given, and nothing of the packages in a place of their own."""
    command = ["make", "gpu", f"PYTHON={sys.executable}", "PIECE=matrix largest", f"OUT={tmp_path}/gpu.json"]
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "ARGS"))
    }  # of a make around this
    finished = subprocess.run(command, cwd=CHECKOUT, env=environ, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-1].startswith("no GPU here; not run: matrix, largest.")
    assert not list(tmp_path.iterdir())


def test_the_guides_have_code_that_can_be_read_and_commands_that_a_night_types() -> None:
    for path, text in [*FILES, *PAGE_OF_IMAGES.items()]:
        assert not path.endswith(".py") or compile(text, path, "exec")
    assert set(COMMANDS) >= ELSEWHERE
