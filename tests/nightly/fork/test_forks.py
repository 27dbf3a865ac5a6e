"""Forks with an environment of their own: installed, linted, tested and updated, with models of a student's."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.engine.fork.forks import clone_into, commit, environment, git, made, run

MODELS = {"convnet": ("ConvNet", "test_acc"), "gan": ("GAN", "g_loss")}  # the class, and a metric that it logs
LONGEST_TESTS_SECONDS = 300
Type = Callable[..., str]


# The first day of a student: her models, up to a newer engine


@pytest.fixture(scope="module")
def hers(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = made(clone, tmp_path_factory.mktemp("day") / "birdsong", "--bare")
    code = Path(__file__).with_name("hers.py").read_text()
    (folder / "src/birdsong/hers.py").write_text(f"{code}\nimport os\nx = [ 1,2 ]\n")
    for name, (class_, _) in MODELS.items():
        (folder / f"conf/model/{name}.yaml").write_text(f"# Hers.\n_target_: birdsong.hers.{class_}\n")
    (folder / "conf/data/pictures.yaml").write_text("# Hers.\n_target_: birdsong.hers.Pictures\n")
    environment(folder, *map(str, folder.glob("wheels/*")), "--editable", ".")
    commit(folder, "Mine")
    return folder


@pytest.fixture
def type_(hers: Path) -> Type:
    """Types a line into a shell in which `source .venv/bin/activate` was typed."""

    def type_(line: str, *, code: int = 0, timeout_seconds: float = 1000) -> str:
        command = ["bash", "-c", f"source .venv/bin/activate && {line}"]
        return run(command, hers, code=code, timeout_seconds=timeout_seconds)

    return type_


@pytest.mark.parametrize("model", MODELS)
def test_a_model_trains_and_what_is_printed_can_be_typed(model: str, hers: Path, type_: Type) -> None:
    told = type_(f"python train.py model={model} data=pictures run_id=first trainer.max_epochs=2")
    assert re.search(rf"^{MODELS[model][1]} +[\d.]+", told, re.MULTILINE), told
    (go_on,) = re.findall(r"^go on      (python .*)$", told, re.MULTILINE)
    gone_on = type_(go_on)
    resumes = r"^resumes    runs/\w+/first/checkpoints/step_\d+.ckpt, at step "
    assert re.search(resumes, gone_on, re.MULTILINE), gone_on
    for line in re.findall(r"^evaluate   (python .*)$", told, re.MULTILINE):
        assert f"reads      runs/{model}/first/checkpoints/" in type_(line)
    if model == "gan":
        events = EventAccumulator(str(hers / "runs/gan/first/tensorboard")).Reload()
        assert "generated" in str(events.Tags()["images"])


def test_a_sweep_over_a_models_own_rate_has_two_results(type_: Type) -> None:
    swept = "model.lr=0.1,0.001 trainer.max_epochs=1 objective=val_loss"
    told = type_(f"python train.py -m model=convnet data=pictures {swept}")
    results = re.findall(r"^.*lr=(0\.\d+) +(\S+) +finished.*$", told, re.MULTILINE)
    assert [rate for rate, _ in results] == ["0.1", "0.001"], told
    assert results[0][1] != results[1][1]


@pytest.mark.timeout(3600)
def test_its_own_tests_tell_what_models_can_not_promise_and_a_run_goes_on_with_a_newer_engine(
    tmp_path: Path, hers: Path, type_: Type
) -> None:
    _assert_tested(told := type_("make test WORKERS=1", timeout_seconds=3500))
    assert sum(map(float, re.findall(r" in ([\d.]+)s ", told))) < LONGEST_TESTS_SECONDS
    type_("make lint")
    type_("make lint STRICT=1", code=2)
    type_("python train.py model=gan data=pictures run_id=older trainer.max_epochs=2")
    newer = clone_into(tmp_path / "lightswitch")
    (newer / "src/lightswitch/owls.py").write_text('"""Owls."""\n')
    commit(newer, "Later")
    (wheel,) = made(newer, tmp_path / "later").glob("wheels/*")
    type_(f"git rm -q wheels/* && mkdir wheels && cp {wheel} wheels")
    version = wheel.name.split("-")[1]
    type_(f"sed -i -E 's/lightswitch==[^\"]+/lightswitch=={version}/' pyproject.toml")
    type_("python -m pip install -qq --no-build-isolation --no-deps wheels/*.whl --editable .")
    type_("python -c 'import lightswitch.owls'")
    resumed = type_("python train.py model=gan data=pictures run_id=older trainer.max_epochs=3")
    assert re.search(r"^resumes    runs/gan/older/checkpoints/step_\d+.ckpt, at step ", resumed, re.MULTILINE)


def _assert_tested(told: str) -> None:
    assert re.search(r"=== \d+ passed, 2 xfailed in ", told), told
    assert "convnet: the same run under single; another by batch norm\n" in told
    refused = "refused by deepspeed_stage_3: DeepSpeed supports "
    assert f"gan: the same run under single; another by noise by rank; {refused}" in told
    assert told.count("a norm over a sample's own features") == 1


# Other environments


def test_a_fork_trains_with_what_its_wheel_holds(clone: Path, tmp_path: Path) -> None:
    folder = made(clone, tmp_path / "birdsong", "--bare")
    (wheel,) = folder.glob("wheels/*")
    told = run([sys.executable, "-S", "train.py"], folder, code=1)
    activate = "type source .venv/bin/activate, or make train, which sets it up"
    assert told == f"error: No module named 'lightswitch'; {activate}\n"
    python = environment(folder, str(wheel), "--editable", ".")
    where = run([str(python), "-c", "import lightswitch, birdsong; print(lightswitch.__file__)"], folder)
    assert str(folder / ".venv") in where
    assert "test/accuracy" in run([str(python), "train.py", "debug=limit"], folder)
    assert run(["git", "check-ignore", "exports/a.pt", "data/a", "runs/a"], folder).count("\n") == 3
    planned = run(["make", "--dry-run", "--always-make", "wheelhouse"], folder)
    build = next(line for line in planned.splitlines() if "pip wheel" in line)
    run(["env", "PIP_FIND_LINKS=wheels", "sh", "-euc", build], folder)  # as the Makefile exports it
    assert (folder / "wheelhouse" / wheel.name).is_file()
    run(["make", "lint"], folder)


def test_a_command_that_pip_installed_from_a_git_address_makes_a_fork(clone: Path, tmp_path: Path) -> None:
    """As `uvx --from git+ADDRESS lightswitch-fork` does."""
    environment(tmp_path, f"git+file://{clone}")
    assert "make train" in run([str(tmp_path / ".venv/bin/lightswitch-fork"), "birdsong", "new", "--bare"], tmp_path)
    (wheel,) = tmp_path.glob("new/wheels/*")
    assert git(clone, "rev-parse", "HEAD")[:7] in wheel.name


def test_a_command_of_a_released_wheel_makes_a_fork_of_that_release(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its wheel is built as .github/workflows/release.yml says, and git finds the host's address on this machine."""
    source = tmp_path / "source"
    git(tmp_path, "clone", "--quiet", str(clone), str(source))
    git(source, "tag", "v0.2.0")
    (line,) = re.findall(r"(sed .* pyproject\.toml)\n", (clone / ".github/workflows/release.yml").read_text())
    run(["bash", "-c", f"GITHUB_SERVER_URL=https://host.example GITHUB_REPOSITORY=us/lightswitch; {line}"], source)
    environment(tmp_path, str(source))
    git(source, "checkout", "--quiet", "pyproject.toml")
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.file://{source}.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://host.example/us/lightswitch")
    told = run([str(tmp_path / ".venv/bin/lightswitch-fork"), "birdsong", "new", "--bare"], tmp_path)
    released = git(source, "rev-parse", "v0.2.0").strip()
    assert f"engine     lightswitch @ git+https://host.example/us/lightswitch@{released}\n" in told


def test_examples_give_way_to_a_model_and_a_dataset_as_the_readme_says(clone: Path, tmp_path: Path) -> None:
    folder = made(clone, tmp_path / "birdsong")
    readme = (folder / "README.md").read_text()
    for path, text in re.findall(r"^```\w+\n# (\S+\.(?:py|yaml))\n(.*?)^```", readme, re.MULTILINE | re.DOTALL):
        (folder / path).write_text(text)
    config = re.sub("- model: .*", "- model: linear", (folder / "conf/config.yaml").read_text())
    (folder / "conf/config.yaml").write_text(re.sub("- data: .*", "- data: halves", config))
    python = environment(folder, *map(str, folder.glob("wheels/*")), "--editable", ".")
    examples = [line for line in (clone / "docs/your-project/examples.txt").read_text().splitlines() if line[0] != "#"]
    git(folder, "rm", "-rq", *(path.replace("/project/", "/birdsong/") for path in examples))
    plans = folder / "conf/strategy/fsdp_tp.yaml"
    plans.write_text(re.sub(r"plans:.*", "plans: {}", plans.read_text(), flags=re.DOTALL))
    tests = ["tests", "-k", "same_run and linear or composes"]
    assert " passed" in run([str(python), "-m", "pytest", "-q", *tests], folder)
    run(["make", "lint"], folder)
    for command in re.findall(r"^    python (train\.py .*?) *#.*$", readme, re.MULTILINE)[:2]:
        short = ["trainer.max_steps=2", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1"]
        run([str(python), *command.split(), *short], folder)
