"""The runs that show what the tables of docs/your-own-code.md and docs/fork.md say, and how one looks at them.

A run types all of the words of its rows as the page has them. What is looked at in its own process is seen after its
first step, which most of them end with.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Trainer
from safetensors.torch import save_file

from tests.engine.conftest import Finished


class Seen(NamedTuple):
    """A run after its first step."""

    trainer: Trainer
    batch: Any
    dtype: torch.dtype  # what the first linear layer computes in
    gradient_norm: float


class Run(NamedTuple):
    """A run of train.py: what makes it short, and whether nothing is looked at that it does after its first step."""

    typed: str = ""
    ends: bool = True
    after: str | None = None  # the run in whose folder it starts, with its words
    write: Callable[[Path], None] = lambda folder: None  # its data


class Inside(NamedTuple):
    """What is found when one looks at a run in its own process. ``typed``: of the row's words; None for all."""

    run: str
    look: Callable[[Seen], Any]
    found: Any
    typed: str | None = None


class Left(NamedTuple):
    """What is found when one looks at what a run has printed and left."""

    run: str
    look: Callable[[Finished], Any]
    found: Any
    typed: str | None = None


class Elsewhere(NamedTuple):
    """Another test that shows it: its file in tests, its name, and the part that it has of a word it puts together."""

    file: str
    test: str
    of_a_word: str | None = None


class Habit(NamedTuple):
    """A row of habits.py."""

    has: str


Shown = Inside | Left | Elsewhere | Habit


_TINY = "model.layers=1 model.width=16 model.sample_tokens=8 logger=csv"


def _write_tokens(folder: Path) -> None:
    """nanoGPT's files, and GPT-2's embedding of their 300 tokens, all of it ones, in a folder of the name FOLDER."""
    for split in ("train", "val"):
        (folder / "data/openwebtext").mkdir(parents=True, exist_ok=True)
        (np.arange(30_000, dtype=np.uint16) % 300).tofile(folder / f"data/openwebtext/{split}.bin")
    (folder / "FOLDER").mkdir()
    save_file({"transformer.wte.weight": torch.ones(300, 16)}, folder / "FOLDER/model.safetensors")


def _write_images(folder: Path) -> None:
    """Fashion-MNIST's files, of 240 images and 60."""
    (folder / "data/fashion-mnist").mkdir(parents=True)
    for split, count in (("train", 240), ("t10k", 60)):
        for name, shape in (("images-idx3", (count, 28, 28)), ("labels-idx1", (count,))):
            header = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape)
            path = folder / f"data/fashion-mnist/{split}-{name}-ubyte"
            path.write_bytes(header + (np.arange(math.prod(shape)) % 10).astype(np.uint8).tobytes())


def _write_text(folder: Path) -> None:
    (folder / "shards").mkdir()
    for number in range(3):
        (folder / f"shards/{number}.txt").write_text("a" * 20_000)


RUNS = {
    "epochs": Run(f"{_TINY} trainer.limit_train_batches=2"),
    "steps": Run(_TINY),
    "template": Run(
        f"{_TINY} trainer.limit_train_batches=2 trainer.limit_val_batches=0 trainer.limit_test_batches=0 "
        "trainer.log_every_n_steps=1",
        ends=False,
    ),
    "transformers": Run(f"{_TINY} trainer.limit_val_batches=1 trainer.limit_test_batches=1", ends=False),
    "validated": Run("", ends=False, after="transformers"),
    "fashion": Run("model.layers=1 logger=csv", write=_write_images),
    "shards": Run(f"{_TINY} global_batch_size=8", write=_write_text),
    "nanogpt": Run("global_batch_size=8 logger=csv"),
    "nanogpt_files": Run(
        "model.layers=1 model.heads=2 model.width=16 model.context=16 model.vocab_size=300 logger=csv",
        write=_write_tokens,
    ),
}


def rates_at(*steps: int) -> Callable[[Seen], Any]:
    """Of the first group, at these steps."""

    def look(seen: Seen) -> list[float]:
        (config,) = seen.trainer.lr_scheduler_configs
        (base, *_), (factor, *_) = config.scheduler.base_lrs, config.scheduler.lr_lambdas
        return [round(base * factor(step), 8) for step in steps]

    return look


def of_groups(*names: str) -> Callable[[Seen], Any]:
    """Of the optimizer's groups: its values of these names, first those of the group whose weights decay."""

    def look(seen: Seen) -> list[Any]:
        (optimizer,) = seen.trainer.optimizers
        return [[group[name] for name in names] for group in optimizer.param_groups]

    return look


def classes_of(*names: str) -> Callable[[Seen], Any]:
    return lambda seen: [type(getattr(seen.trainer, name)).__name__ for name in names]


def of_trainer(*names: str) -> Callable[[Seen], Any]:
    return lambda seen: [getattr(seen.trainer, name) for name in names]


def of_callbacks(kind: type, *names: str) -> Callable[[Seen], Any]:
    """These attributes of each callback of a kind."""
    return lambda seen: [
        [getattr(one, name) for name in names] for one in seen.trainer.callbacks if isinstance(one, kind)
    ]


def samples(seen: Seen) -> list[int]:
    """Of a micro batch, and of a step."""
    return [len(seen.batch[0]), len(seen.batch[0]) * seen.trainer.accumulate_grad_batches]


def logged_steps(run: Finished) -> int:
    return len(run.column("train/loss"))


def run_path(run: Finished) -> str:
    return str(run.run_dir.relative_to(run.folder))


def tells(text: str) -> Callable[[Finished], bool]:
    return lambda run: text in run.out
