"""The documentation site: built with nothing dead in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.conftest import CHECKOUT


def built_in(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder / "site")],
        cwd=folder,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", **environment},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(CHECKOUT / "docs", tmp_path / "docs")
    for file in ("mkdocs.yml", "README.md"):
        shutil.copy(CHECKOUT / file, tmp_path)
    return tmp_path


def test_it_is_built_strictly_and_links_to_the_repository(copy: Path) -> None:
    built = built_in(copy, REPOSITORY_URL="https://example.org/us/lightswitch")
    assert built.returncode == 0, built.stderr
    home = (copy / "site" / "index.html").read_text()
    assert 'href="https://example.org/us/lightswitch/blob/main/CONTRIBUTING.md"' in home
    assert 'href="strategies.html"' in home
    assert "md-tabs" not in home  # with which the first page's sidebar would have a single line
    assert "modules from elsewhere" in home
    assert "fonts.googleapis" not in home
    assert '<html lang="en"' in home
    assert '<html lang="zh-Hans"' in (copy / "site" / "zh" / "guide.html").read_text()
    assert "does not divide over" in (copy / "site" / "search" / "search_index.json").read_text()
