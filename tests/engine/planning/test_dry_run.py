"""mode=dry_run says of each rank what that rank of a real run does."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy

from lightswitch.checkpoints.format import read_index
from lightswitch.planning.collectives import Collective, exchanges
from lightswitch.planning.tracking import Tracking
from tests.engine.conftest import Finished, Train
from tests.engine.planning.test_truth import NumbersOfText
from tests.engine.tiny import LANGUAGE_MODEL
from tests.night import at_night


class Witness(Tracking):
    """Writes witness_<rank>.json: the collectives of step 2, by the ledger; all else as the run itself has it.

    Before that step, DistributedDataParallel still sorts its buckets.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.seen: list[Any] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self.seen.append(batch[0].tolist())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        sent = exchanges((one, 1) for micro in self.steps()[2].collectives for one in micro if one != _of_signals())
        told = {"groups": _groups(trainer), "seen": self.seen, "collectives": [asdict(one) for one in sent]}
        (self.folder / f"witness_{trainer.global_rank}.json").write_text(json.dumps(told))


def _of_signals() -> Collective:
    """What ranks tell one another of signals, beside the step: two numbers of 64 bits."""
    return Collective("all_reduce", 16, tuple(range(dist.get_world_size())))


def _groups(trainer: Trainer) -> dict[str, list[int]]:
    if not isinstance(trainer.strategy, ModelParallelStrategy):
        return {"replicate": dist.get_process_group_ranks(dist.group.WORLD)}
    mesh = trainer.strategy.device_mesh
    return {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in mesh.mesh_dim_names or ()}


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
    assert told["estimate"]["checkpoint_bytes"] == pytest.approx(
        _tensor_bytes(run / "checkpoints" / "last.ckpt"), rel=1e-3
    )
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


def _tensor_bytes(checkpoint: Path) -> int:
    return sum(tensor.nbytes for tensor in read_index(checkpoint).like.values())


def _contents(loaders: list[dict[str, Any]]) -> list[Any]:
    data = NumbersOfText()
    data.setup("fit")
    dataset = data.train_dataloader().dataset
    (loader,) = loaders
    return [[dataset[index][0].tolist() for index in micro] for step in loader["steps"] for micro in step]


def _sorted(collectives: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(collectives, key=lambda one: (one["name"], one["ranks"], one["bytes"]))


@pytest.mark.nightly
def test_what_a_start_refuses_of_callbacks_is_refused(train: Train) -> None:
    swa = "callbacks.mine._target_=lightning.pytorch.callbacks.StochasticWeightAveraging"
    refused = train("mode=dry_run", *MODEL, swa, "callbacks.mine.swa_lrs=0.1", check=False)
    assert refused.returncode == 2
    assert refused.err.startswith("error: StochasticWeightAveraging: a resumed run could not continue it")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("dry_run.rank=[4,last,[1]]", "dry_run.steps=0"),
            (
                "dry_run.rank=4: the world has 4 ranks; use one from 0 to 3",
                "dry_run.rank=last: found str, expected a number, or a list of numbers",
                "dry_run.rank=[1]: found list, expected a number, or a list of numbers",
                "dry_run.steps=0: use a number from 1",
            ),
        ),
        (("global_batch_size=0",), ("global_batch_size 0 and micro_batch_size None: both are numbers of samples",)),
    ],
)
def test_bad_input_gets_a_line(train: Train, words: tuple[str, ...], told: tuple[str, ...]) -> None:
    run = train("mode=dry_run", *MODEL, "trainer.devices=4", *words, check=False)
    assert run.returncode == 2
    lines = run.err.strip().splitlines()
    assert len(lines) == len(told)
    assert all(expected in line for expected, line in zip(told, lines, strict=True))
    assert not list(run.folder.glob("runs/*/*"))


# mode=dry_run over a sweep of worlds


@pytest.mark.nightly
def test_a_sweep_ends_with_how_the_run_scales(train: Train) -> None:
    words = ("strategy=fsdp", "plan.device=h100", "global_batch_size=16", "micro_batch_size=2")
    run = train("-m", "mode=dry_run", *MODEL, *words, "trainer.devices=2,4", "run_id=grid")
    (folder,) = run.folder.glob("runs/*/grid")
    (line,) = json.loads((folder / "scaling.json").read_text())
    found = [(point["ranks"], point["global_batch"], point["accumulation"]) for point in line["points"]]
    assert found == [(2, 16, 4), (4, 16, 2)]
    assert {path.name for path in folder.iterdir()} >= {"scaling.svg", "scaling_dark.svg"}
    assert "efficiency" in run.out
