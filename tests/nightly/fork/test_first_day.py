"""The first day of a student with a fork: four models in the style of public code, up to a newer engine."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.engine.fork.forks import environment, git, made, run

ORDINARY = Path(__file__).with_name("ordinary")
MODELS = {  # the file, its class, the data that it trains with, and a metric that it logs
    "resnet": ("ResNet", "pictures", "test_acc"),  # torchmetrics, OneCycleLR
    "bert": ("Bert", "sentences", "val_acc"),  # a collate of its own
    "gan": ("GAN", "pictures", "g_loss"),  # by hand, logs images
    "diffusion": ("DDPM", "pictures", "val_loss"),  # keeps an average of its weights
}
LONGEST_TESTS_SECONDS = 180
Type = Callable[..., str]


@pytest.fixture(scope="module")
def fork(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As it is once her files are in it, which are written like theirs and not in this project's style."""
    folder = made(clone, tmp_path_factory.mktemp("day") / "birdsong", "--bare")
    for name, (class_, _, _) in MODELS.items():
        code = (ORDINARY / f"{name}.py").read_text()
        (folder / f"src/birdsong/models/{name}.py").write_text(f"{code}\nimport os\nx = [ 1,2 ]\n")
        (folder / f"conf/model/{name}.yaml").write_text(f"# Hers.\n_target_: birdsong.models.{name}.{class_}\n")
    (folder / "src/birdsong/data/hers.py").write_text((ORDINARY / "data.py").read_text())
    for class_ in ("Pictures", "Sentences"):
        text = f"# Hers.\n_target_: birdsong.data.hers.{class_}\n"
        (folder / f"conf/data/{class_.lower()}.yaml").write_text(text)
    environment(folder, "--editable", ".")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message=Mine")
    return folder


@pytest.fixture
def type_(fork: Path) -> Type:
    """Types a line into a shell in which `source .venv/bin/activate` was typed."""

    def type_(line: str, *, code: int = 0, timeout_seconds: float = 1000) -> str:
        return run(
            ["bash", "-c", f"source .venv/bin/activate && {line}"], fork, code=code, timeout_seconds=timeout_seconds
        )

    return type_


def _line(told: str, what: str) -> str:
    """What a run has printed to be typed next."""
    (line,) = re.findall(rf"^{what:<10} (python .*)$", told, re.MULTILINE)
    return str(line)


@pytest.mark.parametrize("model", MODELS)
def test_a_model_trains_and_what_is_printed_can_be_typed(model: str, fork: Path, type_: Type) -> None:
    _, data, metric = MODELS[model]
    told = type_(f"python train.py model={model} data={data} run_id=first trainer.max_epochs=2")
    assert re.search(rf"^{metric} +[\d.]+", told, re.MULTILINE), told
    gone_on = type_(_line(told, "go on"))
    own_schedule = "; to continue, start a new run with a new schedule from these weights\n" in told
    assert own_schedule == (model == "resnet")
    assert own_schedule or re.search(
        r"^resumes    runs/\w+/first/checkpoints/step_\d+.ckpt, at step ", gone_on, re.MULTILINE
    )
    for line in re.findall(r"^evaluate   (python .*)$", told, re.MULTILINE):
        assert f"reads      runs/{model}/first/checkpoints/" in type_(line)
    if model == "gan":
        events = EventAccumulator(str(fork / "runs/gan/first/tensorboard")).Reload()
        assert "generated" in str(events.Tags()["images"])


def test_a_sweep_over_a_models_own_rate_has_two_results(type_: Type) -> None:
    told = type_(
        "python train.py -m model=resnet data=pictures model.lr=0.1,0.001 trainer.max_epochs=1 objective=val_loss"
    )
    results = re.findall(r"^.*lr=(0\.\d+) +(\S+) +finished.*$", told, re.MULTILINE)
    assert [rate for rate, _ in results] == ["0.1", "0.001"], told
    assert results[0][1] != results[1][1]
    refused = type_("python train.py model=resnet data=pictures optimizer.lr=0.01", code=2)
    assert re.search("^error: optimizer.lr: ResNet takes no optimizer; its arguments: model.lr", refused, re.MULTILINE)


@pytest.mark.timeout(3600)
def test_its_own_tests_pass_with_what_models_can_not_promise_told_once(type_: Type) -> None:
    told = type_("make test WORKERS=1", timeout_seconds=3500)
    _assert_tested(told)
    assert sum(map(float, re.findall(r" in ([\d.]+)s ", told))) < LONGEST_TESTS_SECONDS
    type_("make lint")
    type_("make lint STRICT=1", code=2)


@pytest.mark.timeout(3600)
def test_a_newer_engine_is_put_in_and_passes_them_too(newer: Path, fork: Path, type_: Type) -> None:
    type_("python train.py model=bert data=sentences run_id=older trainer.max_epochs=2")
    told = type_(f"make update-engine FROM={newer} WORKERS=1", timeout_seconds=3500)
    assert told.index("Owls are heard.") < told.index(" passed")
    _assert_tested(told)
    changed = git(fork, "status", "--porcelain").splitlines()
    assert all(line[3:].startswith(("src/lightswitch/", "docs/lightswitch/")) for line in changed), changed
    resumed = type_("python train.py model=bert data=sentences run_id=older trainer.max_epochs=3")
    assert re.search(r"^resumes    runs/bert/older/checkpoints/step_\d+.ckpt, at step ", resumed, re.MULTILINE)


def _assert_tested(told: str) -> None:
    assert re.search(r"=== \d+ passed, 3 xfailed in ", told), told
    assert "bert: the same run under single, ddp, fsdp, deepspeed_stage_3\n" in told
    assert "resnet: the same run under single; another by batch norm\n" in told
    assert "diffusion: the same run under single; another by noise by rank\n" in told
    assert (
        "gan: the same run under single; another by noise by rank; refused by deepspeed_stage_3: DeepSpeed supports "
        in told
    )
    assert told.count("a norm over a sample's own features") == 1
