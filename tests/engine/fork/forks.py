"""A clone of the checkout as it lies here, and the forks that are made from it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import venv
from pathlib import Path

from tests.engine.conftest import CHECKOUT


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=tests", "-c", "user.email=tests@localhost")
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout


def clone_into(folder: Path) -> Path:
    """With what is not committed here: a test of a change is to be one of that change."""
    listed = ["git", "-C", str(CHECKOUT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for path in filter(None, subprocess.check_output(listed, text=True).split("\0")):
        if (CHECKOUT / path).is_file():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(CHECKOUT / path, folder / path, follow_symlinks=False)
    git(folder, "init", "--quiet", "--initial-branch=main")
    commit(folder, "All")
    python = folder / ".venv/bin/python"  # with which the engine is built, as `make` would leave it
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return folder


def commit(folder: Path, message: str) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", f"--message={message}")


def fork(clone: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """By a Python that has nothing installed: `make fork` comes before `make train`."""
    return subprocess.run(
        [sys.executable, "-S", "-m", "lightswitch.fork", *arguments],
        cwd=clone,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(clone / "src"), "HOME": str(clone.parent)},
        capture_output=True,
        text=True,
    )


def made(clone: Path, into: Path, *options: str, name: str = "birdsong") -> Path:
    done = fork(clone, name, str(into), *options)
    assert done.returncode == 0, done.stderr
    return into


def environment(folder: Path, *requirements: str) -> Path:
    """Make `.venv` there with the requirements, and with the packages of `python`; as `make` would leave it."""
    venv.EnvBuilder(symlinks=True).create(folder / ".venv")
    python = folder / ".venv/bin/python"
    (site,) = (folder / ".venv/lib").glob("python*/site-packages")
    folders = r"import sys; print(*(path for path in sys.path if path.endswith('site-packages')), sep='\n')"
    (site / "shared.pth").write_text(run(["python", "-c", folders], folder))
    for program in ("shellcheck", "mypy", "ruff"):
        (folder / ".venv/bin" / program).symlink_to(Path(sys.prefix, "bin", program))
    install = [str(python), "-m", "pip", "install", "-qq", "--no-deps", "--no-build-isolation", *requirements]
    run(install, folder)
    (folder / ".venv/installed").touch()
    if (known := CHECKOUT / ".mypy_cache").is_dir():  # what mypy found of the packages, which takes it a minute
        shutil.copytree(known, folder / ".mypy_cache")
    return python


def run(command: list[str], folder: Path, *, code: int = 0, timeout_seconds: float = 1000) -> str:
    """What a command prints, in an environment without this checkout."""
    left_out = ("PYTHONPATH", "PYTEST_", "LIGHTSWITCH_", "MAKE", "ARGS")  # the last two are of a make around this
    environ = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=folder, env=environ, start_new_session=True, **streams) as process:
        try:
            told, _ = process.communicate(timeout=timeout_seconds)
        except BaseException:  # make's own children, too
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == code, told
    return told
