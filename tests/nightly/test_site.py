"""The documentation site: built with nothing dead in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.conftest import CHECKOUT


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(CHECKOUT / "docs", tmp_path / "docs")
    for file in ("mkdocs.yml", "README.md"):
        shutil.copy(CHECKOUT / file, tmp_path)
    return tmp_path


def _built_in(folder: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "REPOSITORY_URL": "https://example.org/us/lightswitch"}
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder / "site")]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)


def test_it_is_built_strictly_and_links_to_the_repository(copy: Path) -> None:
    built = _built_in(copy)
    assert built.returncode == 0, built.stderr
    home = (copy / "site" / "index.html").read_text()
    assert 'href="https://example.org/us/lightswitch/blob/main/CONTRIBUTING.md"' in home
    assert 'href="strategies.html"' in home
    assert "fonts.googleapis" not in home
    assert '<html lang="zh-Hans"' in (copy / "site" / "zh" / "guide.html").read_text()
    assert "does not divide over" in (copy / "site" / "search" / "search_index.json").read_text()


def test_a_dead_link_or_anchor_and_a_page_that_is_not_in_the_navigation_fail(copy: Path) -> None:
    (copy / "docs" / "lost.md").write_text("# Lost\n\n[more](gone.md), [more](strategies.md#nowhere)\n")
    built = _built_in(copy)
    assert built.returncode != 0
    assert [name for name in ("lost.md", "gone.md", "nowhere") if name not in built.stderr] == []
