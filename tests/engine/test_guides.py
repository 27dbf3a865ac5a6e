"""What the guides say to write and to type, written and typed: the longer ones at night."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from lightswitch import load
from lightswitch.export.__main__ import main as export
from tests.engine.conftest import CHECKOUT, PLAIN, PLAIN_DATA, Finished, Train
from tests.night import at_night
from tests.runs import largest_difference

START, OWN, SCALE_OUT, DEBUGGING, README = (
    (CHECKOUT / name).read_text()
    for name in ("docs/start.md", "docs/your-model-and-data.md", "docs/scale-out.md", "docs/debugging.md", "README.md")
)
EXAMPLES = CHECKOUT / "docs" / "examples"
SUFFIXES = (".py", ".yaml")
LAST_STEPS = ("trainer.max_steps=2", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1")
SHORT = (*PLAIN, "trainer.max_steps=2", "trainer.log_every_n_steps=1", "trainer.limit_val_batches=1")


def written(page: str, folder: Path) -> Path:
    """Write a page's files, those of src as a package of another name: the one that they name lies in the checkout."""
    files = dict(re.findall(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    assert len(files) == page.count("```python\n") + page.count("```yaml\n")
    return _of_another_package(files, folder)


def _of_another_package(files: Mapping[str, str], folder: Path) -> Path:
    modules = [path[len("src/") : -len(".py")].replace("/", ".") for path in files if path.startswith("src/")]
    for path, text in files.items():
        for module in modules:
            text = text.replace(module, f"shown.{module}")
        file = folder / path.replace("src/", "shown/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


COMMANDS = {
    command: page
    for page in (START, OWN, README)
    for command in re.findall(r"^(?:    |\| [\w, ]*\| `)python train\.py ([^`…\n]*?)(?:`|$)", page, re.MULTILINE)
    if not re.search("mode=|debug=|pretrained|max_epochs=5|stps|=single", command)  # which others type, or are refused
}
BY_DAY = [command for command in COMMANDS if "data=" in command]


@pytest.mark.parametrize("command", [*BY_DAY, *at_night(*(one for one in COMMANDS if one not in BY_DAY))])
def test_the_commands_of_the_first_pages_train(command: str, train: Train, tmp_path: Path) -> None:
    folder = written(OWN if COMMANDS[command] == OWN else "", tmp_path / "typed")
    (folder / "conf").mkdir(parents=True, exist_ok=True)
    words = shlex.split(command.replace("trainer.devices=8", "trainer.devices=2"), comments=True)
    ranks = 2 if "trainer.devices=2" in words and "strategy=ddp_spawn" not in words else 0
    run = train(*words, *LAST_STEPS, "--config-dir", str(folder / "conf"), folder=folder, ranks=ranks)
    assert "step 2/2" in run.out


@pytest.mark.nightly
def test_the_plan_of_the_page_is_what_its_command_prints(train: Train, tmp_path: Path) -> None:
    """Its table is cut, at the right and below; of another version of torch, a number may differ a little."""
    shown = r"^    python train\.py (mode=plan [^\n]*)\n.*?^```\n(.*?)^…"
    ((plan, table),) = re.findall(shown, SCALE_OUT, re.MULTILINE | re.DOTALL)
    folder = tmp_path / "plan"
    folder.mkdir()
    printed = map(_cells, train(*shlex.split(plan), folder=folder).out.splitlines())
    for row in map(_cells, table.splitlines()):
        expected = [pytest.approx(cell, rel=0.02) if isinstance(cell, float) else cell for cell in row]
        assert any(found[: len(row)] == expected for found in printed), row  # in this order


def _cells(line: str) -> list[str | float]:
    """Cells of a table's row."""
    return [float(cell) if re.fullmatch(r"[\d.]+", cell) else cell for cell in re.split(r"\s{2,}", line.strip())]


# docs/examples


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    files = [path for folder in ("src", "conf") for path in (EXAMPLES / folder).rglob("*.*") if path.suffix in SUFFIXES]
    texts = {path.relative_to(EXAMPLES).as_posix(): path.read_text() for path in (*files, EXAMPLES / "launch.py")}
    return _of_another_package(texts, tmp_path / "fork")


def _overrides(fork: Path, *words: str) -> tuple[str, ...]:
    return (*words, *SHORT, "--config-dir", str(fork / "conf"))


@pytest.mark.nightly
def test_its_logger_has_a_line_for_each_step_and_its_callback_ends_a_run_whose_loss_is_too_high(
    fork: Path, train: Train
) -> None:
    words = _overrides(fork, "callbacks=[default,loss_limit]", "logger=[default,jsonl]", "strategy=ddp")
    run = train(*words, "run_id=sound", ranks=2, folder=fork)
    (file,) = fork.glob("runs/*/sound/metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    losses = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    assert len(losses) == 2
    assert losses == pytest.approx(Finished(0, "", "", fork, "sound").column("train/loss"))
    assert "test/loss" in run.out
    words = (*words, "callbacks.loss_limit.highest=0.1", "trainer.max_steps=20")
    refusal = train(*words, ranks=2, folder=fork, check=False).refusal
    assert re.match(r"train/loss is [\d.]+ at step \d+; use a smaller", refusal)


@pytest.mark.nightly
def test_its_strategy_gives_the_curve_of_one_process_and_resumes_under_another(fork: Path, train: Train) -> None:
    batch = ("global_batch_size=24", "micro_batch_size=6")
    for steps, strategy in ((6, "all_reduce"), (9, "fsdp")):
        words = (*batch, f"trainer.max_steps={steps}")
        train(*_overrides(fork, "run_id=one", "strategy=single"), *words, folder=fork)
        train(*_overrides(fork, "run_id=many", f"strategy={strategy}"), *words, ranks=2, folder=fork)
        assert len(_losses(fork, "one")) == steps
        assert _losses(fork, "many") == pytest.approx(_losses(fork, "one"), abs=1e-6)


def _losses(fork: Path, run_id: str) -> list[float]:
    return [*Finished(0, "", "", fork, run_id).column("train/loss").values()]


def test_its_precision_is_refused_by_deepspeed_before_anything_starts(fork: Path, train: Train) -> None:
    words = _overrides(fork, "strategy=deepspeed_stage_2", "precision=bf16-training")
    assert train(*words, folder=fork, check=False).refusal == (
        "precision BF16Training is a plugin, but DeepSpeed casts by its config; use strategy=ddp or strategy=fsdp"
    )


@pytest.mark.parametrize(("strategy", "ranks"), [("fsdp", 2), *at_night(("single", 0))])
def test_its_precision_computes_training_steps_in_bfloat16_and_nothing_else(
    fork: Path, train: Train, strategy: str, ranks: int
) -> None:
    precise, own = (
        train(*_overrides(fork, f"strategy={strategy}", *words), ranks=ranks, folder=fork)
        for words in (("run_id=a",), ("run_id=b", "precision=bf16-training", "trainer.precision.device=cpu"))
    )
    assert "precision 32-true" in precise.out
    assert "precision bf16-mixed" in own.out
    first, other = (_losses(fork, run_id)[0] for run_id in ("a", "b"))
    assert first != other
    assert first == pytest.approx(other, rel=0.02)


@pytest.mark.nightly
@pytest.mark.skipif(
    find_spec("transformers") is None and not os.environ.get("LIGHTSWITCH_REQUIRE_ALL"),
    reason="transformers is an extra",
)
def test_its_module_is_a_folder_of_the_hub_and_starts_from_one(
    fork: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = "model._target_=shown.project.points.Points"
    run = (model, PLAIN_DATA, "trainer.max_steps=2", "trainer.limit_test_batches=0")
    trained = train(*run, "run_id=a", folder=fork)
    monkeypatch.syspath_prepend(fork)
    export([str(trained.folder / "runs" / "points" / "a"), "--format", "hf", "-o", str(fork / "points")])
    points = importlib.import_module("shown.project.points")
    hub, module = points.HubPoints.from_pretrained(fork / "points"), points.Points()
    module.load_state_dict(module.from_hf(hub.state_dict()))
    some = torch.randn(3, 2)
    assert torch.equal(hub(some), module(some))
    started = train(*run, "run_id=b", f"init_from={fork}/points", folder=fork)
    assert "init_from  4 of the model's 4 tensors are in " in started.out


@pytest.mark.nightly
def test_its_launcher_starts_a_run_of_two_processes(fork: Path) -> None:
    script = ["python", "launch.py", "2", str(CHECKOUT / "train.py"), "strategy=ddp", "run_id=mine"]
    environ = {**os.environ, "PYTHONPATH": f"{CHECKOUT / 'src'}:{CHECKOUT}"}
    done = subprocess.run([*script, *SHORT], cwd=fork, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "64 samples a step = 32 × 2 devices × accumulation 1" in done.stdout
    assert len(list(fork.glob("runs/*/mine/checkpoints/step_2.ckpt/*.bin"))) == 2


# docs/start.md: its commands in turn

SAID = {  # of a command, by its beginning
    "python train.py run_id=one trainer.max_steps=600": r"resumes .*, at step 500",
    "python -m lightswitch.compare": r"train/loss differs by \d(\.\d+)?e-0[789] at most",
    "python train.py mode=": r"(test|val)/loss +1\.\d",
}


@pytest.mark.nightly
@pytest.mark.timeout(1800)  # four runs of 500 steps
def test_the_commands_of_the_first_page_do_in_turn_what_it_says(train: Train, tmp_path: Path) -> None:
    page = START.partition("\n## Switch\n")[2]
    commands = re.findall(r"^    (python (?:train\.py|-m lightswitch\.compare) .*)$", page, re.MULTILINE)
    assert len(commands) >= 6
    for command in commands:
        said = _typed(shlex.split(command), train, tmp_path)
        for beginning, expected in SAID.items():
            assert not command.startswith(beginning) or re.search(expected, said), said
    (loaded,) = re.findall(r'lightswitch\.load\("(.*?)"\)', page)
    assert load(tmp_path / loaded).training is False


def _typed(words: list[str], train: Train, folder: Path) -> str:
    if words[1] == "train.py":
        return train(*words[2:], ranks=2 if "trainer.devices=2" in words else 0, folder=folder).out
    environment = {"PYTHONPATH": f"{CHECKOUT / 'src'}:{CHECKOUT}", "PATH": "", "HOME": str(folder)}
    return subprocess.run(
        [sys.executable, *words[1:]], cwd=folder, env=environment, capture_output=True, text=True, check=True
    ).stdout


# docs/debugging.md


@pytest.mark.nightly
def test_the_commands_and_the_snippet_of_debugging_do_what_they_say(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = (*PLAIN, "name=gpt", *LAST_STEPS, "global_batch_size=64", "trainer.accelerator=cpu")
    mine = train("run_id=mine", *short).folder
    pattern = r"^    (?:RANK=0 )?python (?:-m pdb -c continue )?train\.py (.*)$"
    commands = re.findall(pattern, DEBUGGING, re.MULTILINE)
    assert len(commands) >= 8
    for number, command in enumerate(commands):
        folder = tmp_path / f"typed{number}"
        shutil.copytree(mine / "runs", folder / "runs")
        words = [word for word in shlex.split(command) if word != "cluster=env"]  # as torchrun starts them here
        short_of = () if "--cfg" in words else (*short, "trainer.max_steps=4")
        finished = train(*words, *short_of, ranks=2 if "strategy=ddp" in words else 0, folder=folder)
        assert ("lightswitch.strategies.fsdp.FSDP" if "--cfg" in words else "test/loss") in finished.out, command
    monkeypatch.chdir(mine)
    found: dict[str, object] = {}
    (snippet,) = re.findall(r"```python\n(.*?)```", DEBUGGING, re.DOTALL)
    exec(snippet, found)
    assert float(found["loss"]) > 0  # type: ignore[arg-type]


# a network and a table of docs/examples

NETWORK = """
from torch import nn

def layers(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, num_classes))
"""


@pytest.mark.nightly
def test_a_network_learns_a_table_as_well_over_two_devices(train: Train, fork: Path) -> None:
    (fork / "layers.py").write_text(NETWORK)
    rows = np.random.default_rng(0).normal(5, 2, (400, 2))
    table = np.column_stack([rows, rows[:, 0] > rows[:, 1]])
    np.savetxt(fork / "flowers.csv", table, delimiter=",", header="petal,leaf,kind", comments="")
    words = (
        *("model=resnet", "data=table", "--config-dir", str(fork / "conf"), "trainer.accelerator=cpu"),
        *("data.file=flowers.csv", "data.label=kind", "data.classes=2", "optimizer.lr=0.02"),
        *("model.network._target_=layers.layers", "trainer.max_steps=40", "trainer.log_every_n_steps=1"),
        "trainer.val_check_interval=40",
    )
    train(*words, "run_id=one", "strategy=single", folder=fork)
    out = train(*words, "run_id=two", "strategy=fsdp", ranks=2, folder=fork).out
    one, two = (Finished(0, "", "", fork, name) for name in ("one", "two"))
    assert largest_difference(two, one) < 1e-5
    assert float(re.findall(r"test/accuracy +([\d.]+)", out)[-1]) > 0.9
