"""A plan says what real processes hold: within 1 %, under every strategy, by the same accounting."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from lightswitch.planning.estimate import STATES
from lightswitch.planning.timeline import KINDS
from lightswitch.planning.tracking import Tracking
from tests.engine.conftest import Train
from tests.engine.data.pictures import Pictures, pictures
from tests.engine.data.text import Text, Windows, sentences
from tests.engine.tiny import LANGUAGE_MODEL
from tests.night import at_night


class Truth(Tracking):
    """Writes the least of the peaks of steps 2 and 3, and of what fsdp offloads and what it does not, apart.

    A step's own varies: gloo's threads keep what they have sent until they come to run.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        steps = self.steps()[1:]
        least = min((step.timeline.peak() for step in steps), key=lambda peak: peak.bytes)
        offloaded = (*STATES, "update")
        parts = {"host": offloaded, "device": [kind for kind in KINDS if kind not in offloaded]}
        apart = {
            f"{name}_bytes": min(step.timeline.only(kinds).peak().bytes for step in steps)
            for name, kinds in parts.items()
        }
        told = {**asdict(least), **apart, "flops": steps[0].flops}
        (self.folder / f"peak_{trainer.global_rank}.json").write_text(json.dumps(told))


class _Numbers(Dataset[Any]):
    """Samples kept as Python's numbers: on a CPU, tensors of the data would be in the same memory as the model's."""

    def __init__(self, samples: Iterable[Sequence[Tensor]]) -> None:
        self.samples = [tuple((part.tolist(), part.dtype) for part in sample) for sample in samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(torch.tensor(numbers, dtype=dtype) for numbers, dtype in self.samples[index])


class _Shuffled(RandomSampler):
    """A sampler of a class of its own, whose order is kept as Python's numbers, too, and not as a tensor's."""


def _loader(samples: Iterable[Sequence[Tensor]]) -> DataLoader[Any]:
    numbers = _Numbers(samples)
    return DataLoader(numbers, batch_size=8, sampler=_Shuffled(numbers))


class NumbersOfText(Text):
    def train_dataloader(self) -> Any:
        windows = Windows(sentences(9_000, seed=1), self.context)
        return _loader(windows[i] for i in range(len(windows)))


class NumbersOfPictures(Pictures):
    def train_dataloader(self) -> Any:
        return _loader(pictures(self.samples, seed=1))


TEXT = "data._target_=tests.engine.planning.test_truth.NumbersOfText"
PICTURES = "data._target_=tests.engine.planning.test_truth.NumbersOfPictures"
MODELS = {
    "language": (*LANGUAGE_MODEL, TEXT),
    "pictures": ("model._target_=tests.engine.models.pictures.PatchClassifier", PICTURES, "data.samples=150"),
    "late": ("model._target_=tests.engine.foreign.Late", PICTURES, "data.samples=150"),
}
BATCH = ("global_batch_size=48", "micro_batch_size=12", "trainer.devices=2")  # two micro batches of 12 a device
REAL = (
    *("trainer.max_steps=3", "trainer.limit_val_batches=0", "trainer.num_sanity_val_steps=0", "callbacks=progress"),
    *("trainer.enable_checkpointing=false", "~logger"),
    *(
        "callbacks.truth._target_=tests.engine.planning.test_truth.Truth",
        "callbacks.truth.folder=${hydra:runtime.output_dir}",
    ),
)
TENSOR_PARALLEL = "fsdp_tp trainer.strategy.plans.LanguageModel=tests.engine.models.language.tensor_parallel"
RECOMPUTES = "fsdp trainer.strategy.activation_checkpointing=true"
BUCKETS = "ddp trainer.strategy.gradient_as_bucket_view=true"
OTHERS = [
    ("language", strategy) for strategy in (TENSOR_PARALLEL, RECOMPUTES, "fsdp", "fsdp_hybrid", "fsdp_grad_op", BUCKETS)
]
OTHERS += [("pictures", "ddp"), ("late", "fsdp"), ("late", RECOMPUTES)]


@pytest.mark.parametrize(("model", "strategy"), [("language", "ddp"), *at_night(*OTHERS)])
def test_a_plan_says_what_a_rank_holds(model: str, strategy: str, train: Train) -> None:
    words = (*MODELS[model], *BATCH, *f"strategy={strategy}".split())
    plan, real = planned(train, *words), held(train, *(word for word in words if "devices" not in word), ranks=2)
    assert plan["tensor_bytes"] == pytest.approx(real["bytes"], rel=0.01)
    assert plan["bytes_by_kind"] == pytest.approx(real["by_kind"], abs=0.01 * real["bytes"])
    assert plan["flops_per_step"] == real["flops"]


def planned(train: Train, *words: str) -> dict[str, Any]:
    run = train("mode=plan", *words)
    strategy, *_ = json.loads((run.run_dir / "plan.json").read_text())["strategies"]  # then with less activations
    return dict(strategy)


def held(train: Train, *words: str, ranks: int = 0) -> dict[str, Any]:
    """What the rank with the least holds: as gloo's threads keep what they have sent, it may be more."""
    run = train(*words, *REAL, ranks=ranks)
    peaks = [json.loads((run.run_dir / f"peak_{rank}.json").read_text()) for rank in range(max(1, ranks))]
    return dict(min(peaks, key=lambda peak: peak["bytes"]))


# A plan says what real processes hold, under the strategies and precisions that a day leaves out


@pytest.mark.nightly
def test_what_is_offloaded_is_counted_on_the_host(train: Train) -> None:
    """On a CPU, the two are one; a plan for a GPU has the peak of each."""
    words = (*MODELS["language"], *BATCH, "strategy=fsdp_offload")
    real = held(train, *(word for word in words if "devices" not in word), ranks=2)
    here, there = (planned(train, *words, "precision=32-true", f"plan.device={name}") for name in ("here", "h100"))
    assert (here["tensor_bytes"], here["host_bytes"]) == (pytest.approx(real["bytes"], rel=0.01), 0)
    for name, bytes in (("device_bytes", there["tensor_bytes"]), ("host_bytes", there["host_bytes"])):
        assert bytes == pytest.approx(real[name], rel=0.01)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.nightly
def test_a_plan_says_what_one_process_holds(train: Train, precision: str) -> None:
    words = (*MODELS["language"], "strategy=single", "global_batch_size=12", f"precision={precision}")
    plan, real = planned(train, *words), held(train, *words)
    assert plan["tensor_bytes"] == pytest.approx(real["bytes"], rel=0.01)
