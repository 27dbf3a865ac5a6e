"""The code of docs/extension.md, as it stands there, in real runs."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from lightswitch.export.__main__ import main as export
from tests.engine.conftest import CHECKOUT, PLAIN, PLAIN_DATA, Train
from tests.night import at_night

PAGE = (CHECKOUT / "docs" / "extension.md").read_text()
FILES = dict(re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", PAGE, re.DOTALL))
SHORT = (*PLAIN, "trainer.max_steps=2", "trainer.log_every_n_steps=1", "trainer.limit_val_batches=1")


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    """A folder with the page's files, under another package's name than `project`, which the checkout has."""
    folder = tmp_path / "fork"
    for path, text in FILES.items():
        file = folder / path.replace("src/project/", "extension_page/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace("project.", "extension_page."))
    return folder


def _overrides(fork: Path, *words: str) -> tuple[str, ...]:
    return (*words, *SHORT, "--config-dir", str(fork / "conf"))


def test_the_page_names_a_file_for_each_block_of_code() -> None:
    assert len(FILES) == len(re.findall("```", PAGE)) / 2 == 10


def test_its_commands_are_those_that_are_tried_here() -> None:
    commands = re.findall(r"^    python (.*)$", PAGE, re.MULTILINE)
    choices = [word for command in commands for word in command.split() if re.match(r"(strategy|precision|\w+)=", word)]
    groups = {"callbacks", "logger", "precision", "strategy", "run_id", "init_from"}
    assert {choice.split("=")[0] for choice in choices} == groups
    assert len(commands) == 7


def test_its_callback_ends_a_run_whose_loss_is_too_high(fork: Path, train: Train) -> None:
    arguments = _overrides(fork, "callbacks=[default,loss_limit]", "callbacks.loss_limit.highest=0.1", "strategy=ddp")
    finished = train(*arguments, "trainer.max_steps=20", ranks=2, folder=fork, check=False)
    assert finished.returncode == 2
    assert re.search(r"^error: train/loss is [\d.]+ at step \d+; use a smaller", finished.err, re.MULTILINE)


def test_its_callback_lets_a_sound_run_train(fork: Path, train: Train) -> None:
    assert "test/loss" in train(*_overrides(fork, "callbacks=[default,loss_limit]"), folder=fork).out


def test_its_logger_has_a_line_for_each_step(fork: Path, train: Train) -> None:
    run = train(*_overrides(fork, "logger=[default,jsonl]", "strategy=ddp"), ranks=2, folder=fork)
    rows = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    assert losses == pytest.approx(run.column("train/loss"))
    assert len(losses) == 2


@pytest.mark.parametrize("strategy", ["fsdp", *at_night("single")])
def test_its_precision_computes_training_steps_in_bfloat16_and_nothing_else(
    fork: Path, train: Train, strategy: str
) -> None:
    ranks = {"single": 0}.get(strategy, 2)
    precise, own = (
        train(*_overrides(fork, f"strategy={strategy}", *words), ranks=ranks, folder=fork)
        for words in (("run_id=a",), ("run_id=b", "precision=bf16-training", "trainer.precision.device=cpu"))
    )
    assert "precision 32-true" in precise.out
    assert "precision bf16-mixed" in own.out
    losses = [_losses(fork, run_id) for run_id in ("a", "b")]
    assert losses[0][0] != losses[1][0]
    assert losses[0][0] == pytest.approx(losses[1][0], rel=0.02)


def test_its_precision_is_refused_by_deepspeed_before_anything_starts(fork: Path, train: Train) -> None:
    refused = train(
        *_overrides(fork, "strategy=deepspeed_stage_2", "precision=bf16-training"), folder=fork, check=False
    )
    told = "precision BF16Training is a plugin, but DeepSpeed casts by its config; use strategy=ddp or strategy=fsdp"
    assert refused.err.strip() == f"error: {told}"


@pytest.mark.skipif(
    find_spec("transformers") is None and not os.environ.get("LIGHTSWITCH_REQUIRE_ALL"),
    reason="transformers is an extra",
)
def test_its_module_is_a_folder_of_the_hub_and_starts_from_one(
    fork: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = "model._target_=extension_page.points.Points"
    run = (model, PLAIN_DATA, "trainer.max_steps=2", "trainer.limit_test_batches=0")
    trained = train(*run, "run_id=a", folder=fork)
    monkeypatch.syspath_prepend(fork)
    export([str(trained.folder / "runs" / "points" / "a"), "--format", "hf", "-o", str(fork / "points")])
    points = importlib.import_module("extension_page.points")
    hub, module = points.HubPoints.from_pretrained(fork / "points"), points.Points()
    module.load_state_dict(module.from_hf(hub.state_dict()))
    some = torch.randn(3, 2)
    assert torch.equal(hub(some), module(some))
    started = train(*run, "run_id=b", f"init_from={fork}/points", folder=fork)
    assert "init_from  4 of the model's 4 tensors are in " in started.out


def _losses(fork: Path, run_id: str) -> list[float]:
    (file,) = fork.glob(f"runs/*/{run_id}/metrics.csv")
    rows = [line.split(",") for line in file.read_text().splitlines()]
    column = rows[0].index("train/loss")
    return [float(row[column]) for row in rows[1:] if row[column]]


def test_its_strategy_gives_the_curve_of_one_process_and_resumes_under_another(fork: Path, train: Train) -> None:
    batch = ("global_batch_size=24", "micro_batch_size=6", "trainer.max_steps=6")
    train(*_overrides(fork, "run_id=one", "strategy=single"), *batch, folder=fork)
    train(*_overrides(fork, "run_id=many", "strategy=all_reduce"), *batch, ranks=2, folder=fork)
    assert _losses(fork, "many") == pytest.approx(_losses(fork, "one"), abs=1e-6)
    longer = (*batch[:-1], "trainer.max_steps=9")
    train(*_overrides(fork, "run_id=one", "strategy=single"), *longer, folder=fork)
    train(*_overrides(fork, "run_id=many", "strategy=fsdp"), *longer, ranks=2, folder=fork)
    assert len(_losses(fork, "one")) == 9
    assert _losses(fork, "many") == pytest.approx(_losses(fork, "one"), abs=1e-6)


def test_its_launcher_starts_a_run_of_two_processes(fork: Path) -> None:
    script = ["python", "launch.py", "2", str(CHECKOUT / "train.py"), "strategy=ddp", "run_id=mine"]
    environ = {**os.environ, "PYTHONPATH": f"{CHECKOUT / 'src'}:{CHECKOUT}"}
    done = subprocess.run([*script, *SHORT], cwd=fork, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "64 samples a step = 32 × 2 devices × accumulation 1" in done.stdout
    assert len(list(fork.glob("runs/*/mine/checkpoints/step_2.ckpt/*.distcp"))) == 2
