"""Forks with an environment of their own, where they are installed, linted, tested and updated."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.engine.fork.forks import environment, git, made, run
from tests.engine.fork.test_update import birdsong, unchanged, update

__all__ = ["birdsong", "unchanged"]  # fixtures


def test_a_fork_of_a_package_trains_with_what_the_wheel_holds(clone: Path, tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    run([*build, str(tmp_path), str(clone)], tmp_path)
    (wheel,) = tmp_path.glob("lightswitch-*.whl")
    folder = made(clone, tmp_path / "birdsong", "--bare", "--engine=package", f"--engine-from={wheel}")
    assert not (folder / "src/lightswitch").exists()
    python = environment(folder, str(wheel), "--editable", ".")
    where = run([str(python), "-c", "import lightswitch, birdsong; print(lightswitch.__file__)"], folder)
    assert str(folder / ".venv") in where
    for part in ("py.typed", "CHANGELOG.md"):
        assert Path(where.strip()).with_name(part).is_file()
    assert "test/accuracy" in run([str(python), "train.py", "debug=limit"], folder)
    planned = run(["make", "--dry-run", "--always-make", ".venv/installed"], folder)
    pin = next(line for line in planned.splitlines() if "sed -nE" in line).partition('"')[2].rpartition('"')[0]
    assert run(["sh", "-c", f'printf %s "{pin}"'], folder) == f"lightswitch @ {wheel.as_uri()}"
    planned = run(["make", "--dry-run", "--always-make", "wheelhouse"], folder)
    run(["sh", "-euc", next(line for line in planned.splitlines() if "pip wheel" in line)], folder)
    assert (folder / "wheelhouse" / wheel.name).is_file()
    planned = run(["make", "--dry-run", "--always-make", ".venv/installed", "WHEELHOUSE=wheelhouse"], folder)
    assert "--no-deps --no-build-isolation lightswitch\n" in planned
    run(["make", "lint"], folder)
    assert f"engine     lightswitch @ {wheel.as_uri()}" in run(
        [str(python), "-m", "lightswitch.fork.update", str(wheel)], folder
    )


@pytest.mark.timeout(3600)  # beside other tests; alone, about a minute and a half
def test_make_updates_the_engine_and_passes_all_tests_in_a_fresh_environment(
    clone: Path, newer: Path, tmp_path: Path
) -> None:
    folder = made(clone, tmp_path / "birdsong", "--bare")
    environment(folder, "--editable", ".")
    # each worker imports torch and all else anew
    told = run(["make", "update-engine", f"FROM={newer}", "WORKERS=1"], folder, timeout_seconds=3500)
    assert told.index("Owls are heard.") < told.index(" passed")
    assert " failed" not in told
    changed = git(folder, "status", "--porcelain").splitlines()
    assert all(line[3:].startswith(("src/lightswitch/", "docs/lightswitch/")) for line in changed), changed


def test_examples_give_way_to_a_model_and_a_dataset_as_the_readme_says(clone: Path, tmp_path: Path) -> None:
    folder = made(clone, tmp_path / "birdsong")
    readme = (folder / "README.md").read_text()
    for path, text in re.findall(r"^```\w+\n# (\S+\.(?:py|yaml))\n(.*?)^```", readme, re.MULTILINE | re.DOTALL):
        (folder / path).write_text(text)
    config = (folder / "conf/config.yaml").read_text()
    config = re.sub(
        r"- (model|data): .*", lambda line: f"- {line[1]}: {'linear' if line[1] == 'model' else 'halves'}", config
    )
    (folder / "conf/config.yaml").write_text(config)
    python = environment(folder, "--editable", ".")
    examples = [line for line in (clone / "template/examples.txt").read_text().splitlines() if line[0] != "#"]
    git(folder, "rm", "-rq", *(path.replace("/project/", "/birdsong/") for path in examples))
    plans = folder / "conf/strategy/fsdp_tp.yaml"
    plans.write_text(re.sub(r"plans:.*", "plans: {}", plans.read_text(), flags=re.DOTALL))
    tests = ["tests", "-k", "same_run and linear or composes"]
    told = run([str(python), "-m", "pytest", "-q", *tests], folder)
    assert " passed" in told
    run(["make", "lint"], folder)
    for command in re.findall(r"^    python (train\.py .*?) *#.*$", readme, re.MULTILINE)[:2]:
        short = ["trainer.max_steps=2", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1"]
        run([str(python), *command.split(), *short], folder)


def test_a_wheel_tells_what_it_needs(birdsong: Path, newer: Path, tmp_path: Path) -> None:
    pyproject = newer / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace("\ndependencies = [\n", '\ndependencies = [\n    "owls>=1",\n'))
    build = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    run([*build, str(tmp_path), str(newer)], tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    told = update(birdsong, str(wheel)).splitlines()
    assert told[0].endswith("→ 0.9.0")
    assert [line for line in told if line.startswith("needs ")] == [
        "needs      owls>=1: add it to the dependencies of pyproject.toml, then type make constraints"
    ]
