"""mode=dry_run says of each rank what that rank of a real run does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from lightswitch.checkpoints.format import read_index
from tests.engine.conftest import Finished, Train
from tests.engine.planning.test_truth import NumbersOfText
from tests.engine.tiny import LANGUAGE_MODEL
from tests.night import at_night


class Witness(Callback):
    """Writes witness_<rank>.json: the samples that each batch has."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.seen: list[Any] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch[0].tolist())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        (self.folder / f"witness_{trainer.global_rank}.json").write_text(json.dumps(self.seen))


MODEL = (*LANGUAGE_MODEL, "data._target_=tests.engine.planning.test_truth.NumbersOfText")
REAL = (
    *("trainer.max_steps=4", "trainer.limit_val_batches=0", "trainer.num_sanity_val_steps=0"),
    *("~callbacks.best_checkpoint", "~logger", "~callbacks.lr_monitor"),
    "trainer.log_every_n_steps=50",
    "callbacks.witness._target_=tests.engine.planning.test_dry_run.Witness",
    "callbacks.witness.folder=${hydra:runtime.output_dir}",
)
TENSOR_PARALLEL = "trainer.strategy.plans.LanguageModel=tests.engine.models.language.tensor_parallel"
WORLDS = {  # a step of 24 samples in two micro batches
    "ddp": (2, 6, ()),
    "fsdp": (3, 4, ()),
    "fsdp_hybrid": (4, 3, ("trainer.strategy.shard_size=2",)),
    "fsdp_tp": (4, 6, (TENSOR_PARALLEL,)),
}


@pytest.mark.parametrize("strategy", ["ddp", *at_night("fsdp", "fsdp_hybrid", "fsdp_tp")])
def test_each_rank_does_what_a_dry_run_says(strategy: str, train: Train) -> None:
    size, micro, more = WORLDS[strategy]
    words = (*MODEL, f"strategy={strategy}", "global_batch_size=24", f"micro_batch_size={micro}", *more)
    told = _told(train("mode=dry_run", *words, "dry_run.steps=4", *_ranks(size)))
    run = train(*words, *REAL, ranks=size).run_dir
    bytes = _tensor_bytes(run / "checkpoints" / "last.ckpt")
    assert told["estimate"]["checkpoint_bytes"] == pytest.approx(bytes, rel=1e-3)
    for rank in range(size):
        real = json.loads((run / f"witness_{rank}.json").read_text())
        assert _contents(told["samples"][str(rank)]) == real


def _ranks(size: int) -> tuple[str, str]:
    return f"trainer.devices={size}", f"dry_run.rank=[{','.join(map(str, range(1, size)))}]"


def _told(run: Finished) -> dict[str, Any]:
    return dict(json.loads((run.run_dir / "dry_run.json").read_text()))


def _tensor_bytes(checkpoint: Path) -> int:
    return sum(tensor.nbytes for tensor in read_index(checkpoint).like.values())


def _contents(loaders: list[dict[str, Any]]) -> list[Any]:
    data = NumbersOfText()
    data.setup("fit")
    dataset = data.train_dataloader().dataset
    (loader,) = loaders
    return [[dataset[index][0].tolist() for index in micro] for step in loader["steps"] for micro in step]


@pytest.mark.nightly
def test_what_a_start_refuses_of_callbacks_is_refused(train: Train) -> None:
    swa = "callbacks.mine._target_=lightning.pytorch.callbacks.StochasticWeightAveraging"
    refused = train("mode=dry_run", *MODEL, swa, "callbacks.mine.swa_lrs=0.1", check=False)
    assert refused.returncode == 2
    assert refused.err.startswith("error: StochasticWeightAveraging: a resumed run could not continue it")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("dry_run.rank=[1,4]",), ("dry_run.rank=4: the world has 4 ranks; use one from 0 to 3",)),
        (("dry_run.steps=0",), ("dry_run.steps=0: use a number from 1",)),
        (("global_batch_size=0",), ("global_batch_size=0: use a number from 1",)),
    ],
)
def test_bad_input_gets_a_line(train: Train, words: tuple[str, ...], told: tuple[str, ...]) -> None:
    run = train("mode=dry_run", *MODEL, "trainer.devices=4", *words, check=False)
    assert run.returncode == 2
    lines = run.err.strip().splitlines()
    assert len(lines) == len(told)
    assert all(expected in line for expected, line in zip(told, lines, strict=True))
    assert not list(run.folder.glob("runs/*/*"))


def test_a_dry_run_lists_what_is_read_and_written(train: Train) -> None:
    run = train("mode=dry_run", *MODEL, "strategy=fsdp", "trainer.devices=8", "plan.device=h100")
    sections = {line.split("  ")[0] for line in run.out.splitlines() if line[:1].isalpha()}
    assert sections >= {"world", "batch", "samples", "memory", "files"}
    assert "checkpoints/, by " in run.out
