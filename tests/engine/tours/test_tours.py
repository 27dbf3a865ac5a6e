"""Promises 2 and 3 for each way to train, from start to export: it has the curve of one process, which is killed at
random moments, goes on under another way each time, and is evaluated and exported under the last."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lightswitch.export.__main__ import main as export
from tests.engine.conftest import Finished, Train, runs_in
from tests.engine.launch.witness import WITNESS, witnesses
from tests.engine.tables.matrix import CELLS, cell, devices
from tests.engine.tiny import LANGUAGE
from tests.engine.tours.pairs import BY_DAY, CHAINS, RING, SEED
from tests.engine.ways import WAYS
from tests.night import at_night
from tests.runs import largest_difference, predictions

STEPS = 32  # a start is killed within 15, and goes back by two at most
RUN = (*LANGUAGE, "run_id=mine", "trainer.accelerator=cpu", f"trainer.max_steps={STEPS}")
RUN += (*WITNESS, "trainer.val_check_interval=4", "callbacks.last_checkpoint.every_n_steps=2")
KILL = "callbacks.kill._target_=tests.engine.checkpoints.test_killed.Kill"


@dataclass(frozen=True)
class Tour:
    """What a run that has ended gave, and what is read from its best checkpoint under the same way, by mode."""

    run: Finished
    read: dict[str, Finished]
    exported: dict[str, torch.Tensor]


def _ended(train: Train, way: str, folder: Path | None, *modes: str) -> Tour:
    run = train(*RUN, *RING[way].switches, ranks=RING[way].ranks, folder=folder)
    reader = RING[way] if RING[way].ranks else WAYS["ddp × 2"]  # which need not start its processes
    switches, ranks = reader.switches, reader.ranks
    reads = (*LANGUAGE, *switches, "trainer.accelerator=cpu", f"ckpt_path={run.run_dir}/checkpoints/best.ckpt")
    read = {mode: train(*reads, f"mode={mode}", ranks=ranks) for mode in modes}
    file = run.folder / "model.safetensors"
    export([str(run.run_dir), "-o", str(file)])
    return Tour(run, read, load_file(file))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Tour:
    return _ended(runs_in(tmp_path_factory.mktemp("alone")), "single", None, "validate", "predict")


@pytest.mark.parametrize("number", [*range(BY_DAY), *at_night(*range(BY_DAY, len(CHAINS)))])
def test_a_run_killed_under_one_way_ends_under_the_next_as_in_one_process(
    number: int, alone: Tour, train: Train
) -> None:
    *begun, last = CHAINS[number]
    print(f"from {' to '.join(CHAINS[number])}: TOUR_SEED={SEED}")
    folder = None
    for way in begun:
        kill = (KILL, f"callbacks.kill.seed='{SEED} {way}'")
        killed = train(*RUN, *RING[way].switches, *kill, ranks=RING[way].ranks, folder=folder, check=False)
        assert killed.returncode != 0
        folder = killed.folder
    mode = ("validate", "predict")[number % 2]
    tour = _ended(train, last, folder, mode)
    if last == "ddp × 2 by script":
        assert witnesses(tour.run.run_dir)[0]["launcher"] == "Scripts"
    places = [
        (rank["environment"], rank["local_rank"], str(rank["world_size"])) for rank in witnesses(tour.run.run_dir)
    ]
    assert all(
        [*environment[:3]] == [str(rank), str(local), world] for rank, (environment, local, world) in enumerate(places)
    )
    assert "\nresumes    runs/languagemodel/mine/checkpoints/" in tour.run.out
    assert list(tour.run.column("train/loss")) == list(range(STEPS))
    for metric in ("train/loss", "val/loss", "test/loss", "samples"):
        assert largest_difference(tour.run, alone.run, metric) <= 1e-5, metric
    if mode == "validate":
        assert largest_difference(tour.read[mode], alone.read[mode], "val/loss") <= 1e-5
    else:
        torch.testing.assert_close(predictions(tour.read[mode]), predictions(alone.read[mode]), rtol=0, atol=1e-3)
    torch.testing.assert_close(tour.exported, alone.exported, rtol=0, atol=1e-4)


# What a night has time for: each cell of the matrix


TRAINED = [(s, p) for s, row in json.loads(CELLS.read_text())["cpu"].items() for p in row if row[p] == "trains"]


@pytest.mark.nightly
@pytest.mark.parametrize(("strategy", "precision"), TRAINED)
def test_what_trains_still_does(strategy: str, precision: str, train: Train) -> None:
    assert cell(train, "cpu", strategy, precision, devices(strategy)) == "trains"
