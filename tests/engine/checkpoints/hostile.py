"""Checkpoints that run code when they are unpickled: the code makes a folder."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lightswitch.batches.plan import KEY, Position
from lightswitch.checkpoints import directory, manifest
from tests.engine.plain import PlainModel


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
    sums = manifest.read(path)
    manifest.write(path, {name: manifest.of_file(path / name) for name in sums})
    return path


def edit_index(path: Path, edit: Callable[[Any], None]) -> Path:
    index = pickle.loads((path / ".metadata").read_bytes())
    edit(index)
    (path / ".metadata").write_bytes(pickle.dumps(index))
    return sign(path)


def index(path: Path, ran: Path) -> Path:
    return edit_index(ours(path), lambda found: setattr(found, "planner_data", Payload(ran)))


def state(path: Path, ran: Path) -> Path:
    torch.save({"hyper_parameters": Payload(ran)}, ours(path) / "trainer.pt")
    return sign(path)


def tensors(path: Path, ran: Path) -> Path:
    """The index is a good one; the parts of tensors are not."""
    torch.save({"payload": Payload(ran), "filling": bytes(500)}, ours(path) / "__0_0.distcp")
    return fill(path, (path / "__0_0.distcp").read_bytes())


def fill(path: Path, content: bytes) -> Path:
    """Put a copy of some content in the place of each tensor."""

    def point_to_copies(found: Any) -> None:
        for number, info in enumerate(found.storage_data.values()):
            info.offset, info.length = number * len(content), len(content)
        (path / "__0_0.distcp").write_bytes(content * len(found.storage_data))

    return edit_index(path, point_to_copies)


def objects(path: Path, ran: Path) -> Path:
    """What should be tensors is bytes, which torch's planner unpickles."""
    torch.save(Payload(ran), ours(path) / "__0_0.distcp")

    def call_them_bytes(found: Any) -> None:
        kind = torch.distributed.checkpoint.metadata.BytesStorageMetadata
        index_of = torch.distributed.checkpoint.metadata.MetadataIndex
        info = next(iter(found.storage_data.values()))
        info.offset, info.length = 0, (path / "__0_0.distcp").stat().st_size
        found.storage_data = {index_of(name): info for name in found.state_dict_metadata}
        found.state_dict_metadata = {name: kind() for name in found.state_dict_metadata}

    return edit_index(path, call_them_bytes)


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


DIRECTORIES = (index, state, tensors, objects)
FILES = (file, file_of_old, pickled)
