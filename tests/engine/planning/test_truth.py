"""A plan says what real processes hold: within 5 %, under every strategy, measured without the plan's code."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, RandomSampler

from tests.engine.conftest import Train, runs_in
from tests.engine.data.text import Text, Windows, sentences
from tests.engine.models.pictures import Pictures, pictures
from tests.engine.tiny import LANGUAGE_MODEL
from tests.night import at_night


class _Storages(TorchDispatchMode):
    """Sums the bytes of all storages after each operator: what `resize_` frees, too."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        self.add(out, args)
        held = (storage() for storage in self.live.values())
        self.peak = max(self.peak, sum(one.nbytes() for one in held if one is not None))
        return out

    def add(self, *trees: Any) -> None:
        for tensor in tree_leaves(trees):
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            if isinstance(local, Tensor) and not local.is_meta:
                self.live[local.untyped_storage()._cdata] = weakref.ref(local.untyped_storage())


class Truth(Callback):
    """Writes the least of the peaks of steps 2 and 3.

    A step's own varies: gloo's threads keep what they have sent until they come to run.
    """

    def __init__(self, folder: str) -> None:
        self.folder, self.storages, self.peaks = Path(folder), _Storages(), list[int]()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.storages.__enter__()  # before the strategy enters modes of its own around hooks

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
        with torch._C.DisableTorchFunction():  # ZeRO-3's shards, which a hook is refused to read
            self.storages.add([*pl_module.parameters(), *pl_module.buffers()], states, batch)
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.peaks.append(0)
            self.storages.peak = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.peaks[-1] = self.storages.peak

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.storages.__exit__(None, None, None)
        told = {"bytes": min(self.peaks[1:])}
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
CONFIG = "{model_type: gpt2, vocab_size: 256, n_embd: 32, n_layer: 2, n_head: 2, n_positions: 32}"
OURS = {  # of the project: what a plan is shown to say of a GPT, a ViT and a model of transformers
    "gpt": ("model=gpt", "model.context=32", TEXT),
    "vit": ("model=vit", "model.image_size=8", PICTURES, "data.samples=150"),
    "transformers": ("model=hf_causal_lm", f"model.config={CONFIG}", "model.context=32", "model.tokenizer=null", TEXT),
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
RECOMPUTES = "fsdp trainer.strategy.activation_checkpointing=true"
BUCKETS = "ddp trainer.strategy.gradient_as_bucket_view=true"
ZERO = [f"deepspeed_stage_{stage} trainer.strategy.reduce_bucket_size=20000" for stage in (1, 2, 3)]
OTHERS = [("language", strategy) for strategy in (RECOMPUTES, "fsdp_hybrid", "fsdp_grad_op", BUCKETS, *ZERO)]
OTHERS += [("pictures", "ddp"), ("pictures", "fsdp"), ("late", "fsdp"), ("late", RECOMPUTES)]


@pytest.mark.parametrize(("model", "strategy"), [("language", "ddp"), ("language", "fsdp"), *at_night(*OTHERS)])
def test_a_plan_says_what_a_rank_holds(model: str, strategy: str, train: Train) -> None:
    words = (*MODELS[model], *BATCH, *f"strategy={strategy}".split())
    plan, real = planned(train, *words), held(train, *(word for word in words if "devices" not in word), ranks=2)
    assert plan["tensor_bytes"] == pytest.approx(real, rel=0.05)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["single", "fsdp"])
@pytest.mark.parametrize("model", OURS)
def test_a_plan_says_what_a_model_of_the_project_holds(model: str, strategy: str, tmp_path: Path) -> None:
    if model == "transformers":
        pytest.importorskip("transformers")
    train, ranks = runs_in(tmp_path), 2 if strategy == "fsdp" else 1
    words = (*OURS[model], f"strategy={strategy}", f"global_batch_size={12 * ranks}")
    plan = planned(train, *words, f"trainer.devices={ranks}")
    assert plan["tensor_bytes"] == pytest.approx(held(train, *words, ranks=ranks if ranks > 1 else 0), rel=0.05)


def planned(train: Train, *words: str) -> dict[str, Any]:
    run = train("mode=plan", *words)
    strategy, *_ = json.loads((run.run_dir / "plan.json").read_text())["strategies"]  # then with less activations
    return dict(strategy)


def held(train: Train, *words: str, ranks: int = 0) -> int:
    """What the rank with the least holds: as gloo's threads keep what they have sent, it may be more."""
    run = train(*words, *REAL, ranks=ranks)
    peaks = [json.loads((run.run_dir / f"peak_{rank}.json").read_text()) for rank in range(max(1, ranks))]
    return min(int(peak["bytes"]) for peak in peaks)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.nightly
def test_a_plan_says_what_one_process_holds(train: Train, precision: str) -> None:
    words = (*MODELS["language"], "strategy=single", "global_batch_size=12", f"precision={precision}")
    plan, real = planned(train, *words), held(train, *words)
    assert plan["tensor_bytes"] == pytest.approx(real, rel=0.05)
