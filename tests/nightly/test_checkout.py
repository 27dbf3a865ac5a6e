"""The tests leave the checkout as it was, also for one who has neither Slurm nor root, nor a home to write to."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.engine.conftest import CHECKOUT
from tests.engine.slurm.cluster import PATH

SUITE = ("tests/engine/slurm", "tests/engine/test_regular_files.py")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What a stranger has who has just cloned the project."""
    attempt = subprocess.run(["unshare", "--user", "--map-root-user", "true"], capture_output=True, text=True)
    if attempt.returncode:
        pytest.skip(f"no new user namespaces: {attempt.stderr.strip()}")
    clone = tmp_path / "clone"
    for folder in (".ci", "benchmarks", "conf", "docs", "slurm", "src", "tests"):
        shutil.copytree(CHECKOUT / folder, clone / folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for file in ("Makefile", "README.md", "pyproject.toml", "train.py"):
        shutil.copy(CHECKOUT / file, clone)
    subprocess.run(["git", "init", "--quiet", str(clone)], check=True)
    return clone


def test_the_suite_removes_nothing_where_slurm_is_not_installed(clone: Path) -> None:
    slurm = ("sbatch", "slurmctld", "slurmd")
    programs = [found for program in slurm if (found := shutil.which(program, path=PATH))]
    hide = "".join(f"mount --bind /dev/null {os.path.realpath(program)} && " for program in programs)
    in_namespace = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-euc", f'{hide}exec "$0" "$@"']
    assert re.search("not installed: .*sbatch, slurmctld, slurmd", _run_suite(in_namespace, clone, Path.home()))


def test_the_suite_removes_nothing_without_root_and_in_a_home_that_is_read_only(clone: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o555)
    assert "machines of namespaces need root" in _run_suite(["unshare", "--user"], clone, home)


def _run_suite(wrapper: list[str], clone: Path, home: Path) -> str:
    before = _contents(clone)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("LIGHTSWITCH_", "PYTEST_"))}
    environ |= {"PYTHONPATH": str(clone / "src"), "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(home)}
    options = ["-p", "no:cacheprovider", "--basetemp", str(clone.with_name("temporary")), "-q"]
    command = [*wrapper, "python", "-m", "pytest", *options, *SUITE]
    done = subprocess.run(command, cwd=clone, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert _contents(clone) == before
    return done.stdout


def _contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Every path below a folder, with its size and the time of its last change."""
    found = ((path, path.lstat()) for path in folder.rglob("*"))
    return {str(path): (state.st_size, state.st_mtime_ns) for path, state in found}
