"""Training loaders of unequal lengths that make a batch together: the same samples at any world size, and on."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightswitch.batches.callback import GlobalBatch
from lightswitch.batches.plan import BatchPlan
from lightswitch.errors import Refused
from lightswitch.loop.loops import replace_loops
from tests.engine.batches.streams import SizedStream, Stream
from tests.engine.conftest import Finished, Train
from tests.engine.fits import local_trainer
from tests.engine.plain import PlainData, PlainModel, Points
from tests.night import at_night

PAIRS = (
    *(
        "model._target_=tests.engine.batches.test_combined.PairsModel",
        "data._target_=tests.engine.batches.test_combined.PairsData",
    ),
    *(
        "run_id=mine",
        "model.folder=${hydra:runtime.output_dir}",
        "trainer.accelerator=cpu",
        "trainer.log_every_n_steps=1",
    ),
    *("trainer.val_check_interval=100", "trainer.num_sanity_val_steps=0"),
)
STEPS = 17  # of 10 or 5 in an epoch


class PairsData(PlainData):
    """
    Args:
        mode: None for a plain dict of loaders, as most people write it.
    """

    def __init__(self, mode: str | None, a: int = 640, b: int = 320, workers: int = 0) -> None:
        super().__init__()
        self.mode, self.sizes, self.workers = mode, {"a": a, "b": b}, workers

    def train_dataloader(self) -> Any:
        loaders = {
            name: DataLoader(Points(size, offset), 8, shuffle=True, num_workers=self.workers)
            for offset, (name, size) in enumerate(self.sizes.items())
        }
        return CombinedLoader(loaders, self.mode) if self.mode else loaders


class PairsModel(PlainModel):
    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        parts = {name: part for name, part in batch.items() if part is not None}
        with (self.folder / f"read_{self.trainer.global_rank}.jsonl").open("a") as file:
            read = {name: part[2].tolist() for name, part in parts.items()}
            file.write(json.dumps({"step": self.trainer.global_step, **read}) + "\n")
        losses = [super(PairsModel, self).training_step(part, batch_idx) for part in parts.values()]
        return sum(losses[1:], losses[0])


def _read(run: Finished) -> dict[int, dict[str, set[int]]]:
    """Of each step and each loader, the samples that all ranks read together."""
    steps: dict[int, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for file in run.run_dir.glob("read_*.jsonl"):
        for line in map(json.loads, file.read_text().splitlines()):
            for name in line.keys() - {"step"}:
                steps[line["step"]][name] |= set(line[name])
    return {step: dict(read) for step, read in steps.items()}


@pytest.mark.parametrize("mode", ["null", *at_night("max_size", "min_size")])
def test_two_loaders_read_the_same_at_any_world_size_and_after_a_resume(mode: str, train: Train) -> None:
    run = (*PAIRS, f"data.mode={mode}")
    whole = train(*run, f"trainer.max_steps={STEPS}")
    split = train(*run, f"trainer.max_steps={STEPS}", "micro_batch_size=16", ranks=2)
    first = train(*run, "trainer.max_steps=7", "data.workers=2")
    train(*run, f"trainer.max_steps={STEPS}", folder=first.folder)
    assert _read(split) == _read(whole)
    assert _read(first) == _read(whole)
    assert split.column("train/loss") == pytest.approx(whole.column("train/loss"), abs=1e-5)
    longest = {"null": {"a": 64, "b": 64}, "min_size": {"a": 64, "b": 64}, "max_size": {"a": 64}}
    assert {name: len(read) for name, read in _read(whole)[7].items()} == longest[mode]


# Streams beside other training loaders, in one process: what each step reads, whatever the accumulation


WHOLE, CUT = BatchPlan(8, 8, 1, 1), BatchPlan(8, 2, 1, 4)


class Reading(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.read: dict[tuple[int, int], dict[str, list[int]]] = {}

    def training_step(self, batch: dict[str, Tensor | None], batch_idx: int) -> Tensor:
        step = self.read.setdefault((self.current_epoch, self.global_step), {})
        for name, part in batch.items():
            step.setdefault(name, []).extend([] if part is None else part.tolist())
        return self.layer.weight.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def _streamed(plan: BatchPlan, mode: str, folder: Path, **sets: Any) -> dict[tuple[int, int], dict[str, list[int]]]:
    model = Reading()
    loaders = {name: DataLoader(data, 3, drop_last=True) for name, data in sets.items()}
    _trainer(plan, folder).fit(model, CombinedLoader(loaders, mode))
    return model.read


def _trainer(plan: BatchPlan, folder: Path) -> pl.Trainer:
    batch = GlobalBatch(plan, seed=0)
    trainer = local_trainer(folder, batch, max_epochs=2, accumulate_grad_batches=plan.accumulation)
    replace_loops(trainer)
    return trainer


class StatefulLoader(DataLoader):
    """Keeps a state, as torchdata's StatefulDataLoader."""

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("the engine keeps the position")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("the engine sets the position")


SETS = {"a": range(40), "b": Stream(range(27))}  # five steps, and three
LENGTHS = {"min_size": [8, 8, 8], "max_size": [8, 8, 8, 0, 0], "max_size_cycle": [8, 8, 8, 8, 8]}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("mode", LENGTHS)
def test_a_stream_beside_a_longer_loader_reads_the_same_at_any_accumulation(mode: str, tmp_path: Path) -> None:
    sets = SETS if mode != "max_size_cycle" else SETS | {"b": SizedStream(range(27))}
    whole, cut = (_streamed(plan, mode, tmp_path, **sets) for plan in (WHOLE, CUT))
    assert whole == cut
    epochs = [[step["b"] for (of, _), step in whole.items() if of == epoch] for epoch in range(2)]
    assert [[len(ids) for ids in epoch] for epoch in epochs] == [LENGTHS[mode]] * 2
    assert [*range(8)] == epochs[0][0] == epochs[1][0]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_of_several_loaders_in_a_cycle_a_stream_must_have_a_length(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"has no len\(\), so it is unknown which loader ends last"):
        _streamed(WHOLE, "max_size_cycle", tmp_path, **SETS)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dataset", [range(40), Stream(range(40))])
def test_a_loader_that_keeps_a_state_is_not_asked_for_it(dataset: Any, tmp_path: Path) -> None:
    trainer = _trainer(WHOLE, tmp_path)
    trainer.fit(Reading(), CombinedLoader({"a": StatefulLoader(dataset, 4)}, "min_size"))
    assert "combined_loader" not in trainer.fit_loop.state_dict()["state_dict"]
