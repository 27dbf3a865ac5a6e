"""Checkpoints that run code when they are unpickled: the code makes a folder."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lightswitch.batches.plan import KEY, Position
from lightswitch.checkpoints import directory, format
from tests.engine.plain import PlainModel

BEFORE = Path(__file__).parents[1] / "before/runs_of_0ddfbcd/ddp/checkpoints/step_20.ckpt"


class Payload:
    def __init__(self, ran: Path) -> None:
        self.ran = ran

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.ran),)


def ours(path: Path, **state: Any) -> Path:
    """A good one, of `PlainModel` at step 4 of a run of the defaults."""
    tensors = {f"model.{name}": value for name, value in PlainModel().state_dict().items()}
    position = asdict(Position(global_step=4, samples=256, step=4, seed=42, global_batch=64, dataset=200))
    directory.write(path, tensors, {KEY: position, "pytorch-lightning_version": "2.6.6", **state}, ranks=None)
    return path


def sign(path: Path) -> Path:
    """Write the checksums of the files as they are now, as whoever changes them would."""
    format.write_sums(path, {name: format.sum_of(path / name) for name in format.read_sums(path)})
    return path


def edit_index(path: Path, edit: Callable[[Any], None]) -> Path:
    index = json.loads((path / "index.json").read_text())
    edit(index["tensors"])
    (path / "index.json").write_text(json.dumps(index))
    return sign(path)


def state(path: Path, ran: Path) -> Path:
    torch.save({"hyper_parameters": Payload(ran)}, ours(path) / "trainer.pt")
    return sign(path)


def edit_pickled_index(path: Path, edit: Callable[[Any], None]) -> Path:
    """One from before the JSON index."""
    shutil.copytree(BEFORE, path)
    index = pickle.loads((path / ".metadata").read_bytes())
    edit(index)
    (path / ".metadata").write_bytes(pickle.dumps(index))
    return sign(path)


def index(path: Path, ran: Path) -> Path:
    return edit_pickled_index(path, lambda found: setattr(found, "planner_data", Payload(ran)))


def tensors(path: Path, ran: Path) -> Path:
    """The index is a good one; the parts of tensors are not."""
    torch.save({"payload": Payload(ran), "filling": bytes(5000)}, path.with_name("content"))
    content = path.with_name("content").read_bytes()

    def point_to_copies(found: Any) -> None:
        for number, info in enumerate(found.storage_data.values()):
            info.relative_path, info.offset, info.length = "__0_0.distcp", number * len(content), len(content)
        (path / "__0_0.distcp").write_bytes(content * len(found.storage_data))

    return edit_pickled_index(path, point_to_copies)


def file(path: Path, ran: Path) -> Path:
    torch.save({"state_dict": PlainModel().state_dict(), "callbacks": Payload(ran)}, path)
    return path


def file_of_old(path: Path, ran: Path) -> Path:
    """As torch wrote before 1.6: pickles, one after the other, and no zip archive."""
    torch.save({"state_dict": {"w": Payload(ran)}}, path, _use_new_zipfile_serialization=False)
    return path


def pickled(path: Path, ran: Path) -> Path:
    path.write_bytes(pickle.dumps(Payload(ran)))
    return path


DIRECTORIES = (index, state, tensors)
FILES = (file, file_of_old, pickled)
