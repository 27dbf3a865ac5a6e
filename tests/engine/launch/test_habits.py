"""What Lightning's users have in their modules and fingers does what its name says, or a line says what to type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.engine.conftest import PLAIN_DATA, Finished, Train, runs_in
from tests.night import at_night

Ran = Callable[[str], Finished]

RUNS: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "habits.yaml").read_text())
BY_DAY = [name for name, row in RUNS.items() if "habits" in row and not row.get("night")]
BY_NIGHT = [name for name, row in RUNS.items() if "habits" in row and row.get("night")]


def _steps(run: Finished) -> int:
    """How many were logged, from 0 on."""
    steps = list(run.column("train/loss"))
    return len(steps) if steps == list(range(len(steps))) else -1


def _best_step(run: Finished) -> int:
    state = torch.load(run.run_dir / "checkpoints/best.ckpt/trainer.pt", weights_only=True)
    return int(state["global_step"])


def _is_best(run: Finished, metric: str, best: Callable[..., float]) -> bool:
    values = run.column(metric)
    return _best_step(run) == best(values, key=values.__getitem__) + 1


def _samples_a_step(run: Finished) -> list[int]:
    """As the speeds in samples and in batches say."""
    speeds, seconds = run.column("throughput/samples_per_second"), run.column("throughput/step_seconds")
    return sorted({round(speeds[step] * seconds[step]) for step in speeds})


def _rates(run: Finished) -> list[float]:
    rates = run.column("lr-SGD")
    return [round(rates[step], 5) for step in (0, 5, 10, 15)]


def _checkpoints(run: Finished) -> list[str]:
    return sorted(path.name for path in (run.run_dir / "checkpoints").iterdir())


LOOKS: dict[str, Callable[..., Any]] = {
    "steps": _steps,
    "has steps": lambda run: _steps(run) > 0,
    "steps of": lambda run, metric: list(run.column(metric)),
    "last value of": lambda run, metric: list(run.column(metric).values())[-1],
    "count of values of": lambda run, metric: len(run.column(metric)),
    "different values of": lambda run, metric: len(set(run.column(metric).values())),
    "times told": lambda run, words: run.out.count(words),
    "checkpoints": _checkpoints,
    "has checkpoint": lambda run, name: name in _checkpoints(run),
    "best step": _best_step,
    "is lowest": lambda run, metric: _is_best(run, metric, min),
    "is highest": lambda run, metric: _is_best(run, metric, max),
    "samples a step": _samples_a_step,
    "rates": _rates,
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The run of a name, which is started once."""
    train = runs_in(tmp_path_factory.mktemp("habits"))

    @cache
    def ran(name: str) -> Finished:
        row = RUNS[name]
        before = ran(row["after"]) if "after" in row else None
        words = (f"model._target_={row['model']}", PLAIN_DATA, "logger=csv", "global_batch_size=40")
        typed = row.get("typed", "")
        run_id = typed.partition("run_id=")[2].partition(" ")[0] or "*"  # a pattern of names
        folder = before and before.folder
        run = train(*words, "trainer.log_every_n_steps=1", *typed.split(), check=False, folder=folder)
        assert run.returncode == row.get("code", 0), f"{name}\n{run.out}\n{run.err}"
        return replace(run, run_id=run_id)

    return ran


@pytest.mark.parametrize("name", [*BY_DAY, *at_night(*BY_NIGHT)])
def test_each_habit_of_a_run_has_its_effect_or_its_line(name: str, ran: Ran) -> None:
    run, habits = ran(name), RUNS[name]["habits"]
    out = run.err if run.returncode else run.out
    assert "Traceback" not in run.err
    untold = {has: row["told"] for has, row in habits.items() if row.get("told", "") not in out}
    assert untold == {}, out
    looked = {has: row for has, row in habits.items() if "look" in row}
    found = {has: LOOKS[row["look"][0]](run, *row["look"][1:]) for has, row in looked.items()}
    assert found == {has: row["found"] for has, row in looked.items()}


@pytest.mark.nightly
def test_a_module_that_optimizes_by_hand_resumes_at_the_very_sample(ran: Ran) -> None:
    resumed, whole = ran("by hand, resumed").column("train/loss"), ran("by hand").column("train/loss")
    assert resumed == pytest.approx(whole, abs=1e-6)


SHORT = ("model._target_=tests.engine.plain.PlainModel", "logger=csv", "trainer.max_steps=1")


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        *at_night(("data.batch_size=8", "8 samples a step = 8 × 1 device × accumulation 1")),
        ("seed=1", "64 samples a step = 64 × 1 device × accumulation 1"),
    ],
)
def test_a_batch_size_that_data_bring_along_is_that_of_a_step(typed: str, told: str, train: Train) -> None:
    """But not to one who has typed that of the run."""
    run = train(*SHORT, PLAIN_DATA, typed)
    assert f"batch      {told}\n" in run.out
    assert "is replaced by the global batch" not in run.out


def test_a_batch_size_that_no_argument_tells_is_said_to_be_replaced(train: Train) -> None:
    run = train(*SHORT, "data._target_=tests.engine.plain.FixedData")
    line = "batch      24, of which a loader makes its batches, is replaced by the global batch of 64; to use it, type "
    assert run.out.count(f"{line}global_batch_size=24\n") == 1
