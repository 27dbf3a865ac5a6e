"""mode=dry_run says of each rank what that rank of a real run does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import Finished, Train
from tests.engine.planning.truth import NumbersOfText
from tests.engine.tiny import LANGUAGE_MODEL

MODEL = (*LANGUAGE_MODEL, "data._target_=tests.engine.planning.truth.NumbersOfText")
REAL = (
    *("trainer.max_steps=3", "trainer.limit_val_batches=0", "trainer.num_sanity_val_steps=0"),
    *("~callbacks.best_checkpoint", "~logger", "~callbacks.lr_monitor"),
    "trainer.log_every_n_steps=50",
    "callbacks.witness._target_=tests.engine.planning.witness.Witness",
    "callbacks.witness.folder=${hydra:runtime.output_dir}",
)
TENSOR_PARALLEL = "trainer.strategy.plans.LanguageModel=tests.engine.models.language.tensor_parallel"
WORLDS = {  # a step of 24 samples in two micro batches
    "ddp": (2, 6, ()),
    "fsdp": (3, 4, ()),
    "fsdp_hybrid": (4, 3, ("trainer.strategy.shard_size=2",)),
    "fsdp_tp": (4, 6, (TENSOR_PARALLEL,)),
}


@pytest.mark.parametrize("strategy", WORLDS)
def test_each_rank_does_what_a_dry_run_says(train: Train, strategy: str) -> None:
    size, micro, more = WORLDS[strategy]
    words = (*MODEL, f"strategy={strategy}", "global_batch_size=24", f"micro_batch_size={micro}", *more)
    told = _told(train("mode=dry_run", *words, "dry_run.steps=3", *_ranks(size)))
    run = train(*words, *REAL, ranks=size).run_dir
    assert told["checkpoint"]["files"] == _files(run / "checkpoints" / "last.ckpt")
    for rank in range(size):
        found = told["ranks"][str(rank)]
        real = json.loads((run / f"witness_{rank}.json").read_text())
        assert {name: axis["ranks"] for name, axis in found["groups"].items()} == real["groups"]
        assert _contents(found["samples"]) == real["seen"]
        assert _sorted(found["collectives"]) == _sorted(real["collectives"])


def _ranks(size: int) -> tuple[str, str]:
    return f"trainer.devices={size}", f"dry_run.rank=[{','.join(map(str, range(1, size)))}]"


def _told(run: Finished) -> dict[str, Any]:
    return dict(json.loads((run.run_dir / "dry_run.json").read_text()))


def _files(checkpoint: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in checkpoint.glob("*.distcp")}


def _contents(loaders: list[dict[str, Any]]) -> list[Any]:
    data = NumbersOfText()
    data.setup("fit")
    dataset = data.train_dataloader().dataset
    (loader,) = loaders
    return [[dataset[index][0].tolist() for index in micro] for step in loader["steps"] for micro in step]


def _sorted(collectives: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(collectives, key=lambda one: (one["name"], one["ranks"], one["bytes"]))
