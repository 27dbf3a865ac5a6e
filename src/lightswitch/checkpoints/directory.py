"""A checkpoint on disk: one directory, with the same content under every strategy and world size.

__<rank>_0.distcp, .metadata   torch.distributed.checkpoint: model.<name>, optimizer.<index>.<name>.<key>
trainer.pt                     all else, readable with weights_only=True
SHA256SUMS                     of every file above, as `sha256sum -c` reads them
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save

from lightswitch.checkpoints.piece import Piece
from lightswitch.checkpoints.ranks import LostRank, OfAll, Ranks, Unanswered
from lightswitch.refused import Refused

STATE = "trainer.pt"
SUMS = "SHA256SUMS"
_TENSORS = ".metadata"


class UnwrittenCheckpoint(Refused, OSError):
    """A disk that is full, or gone."""


def write(path: Path, tensors: Mapping[str, Tensor | Piece], state: dict[str, Any], ranks: Ranks | None) -> None:
    """Written beside and renamed into place: ``path`` is whole at any moment, or it is not there.

    Collective over ``ranks``; None stands for one process. Tensors may be spread over the ranks (DTensor, Piece); of
    those that every rank holds, one writes each.

    Raises:
        UnwrittenCheckpoint: on every rank, when one of them could not write; what stood at ``path`` before still does.
        LostRank: on every rank, when one of them failed otherwise, or did not write in time.
    """
    rank = ranks.writing.rank if ranks else 0
    partial = path.with_name(f"{path.name}.partial")
    _together(ranks, "open it", lambda: _empty(partial) if rank == 0 else None)
    sums = _together(ranks, "write its part", lambda: _write_tensors(partial, tensors, ranks, rank))
    _together(ranks, "finish it", lambda: _finish(path, partial, state, sums) if rank == 0 else None)


def read_state(path: Path) -> dict[str, Any]:
    """All but the tensors of the checkpoint."""
    state: dict[str, Any] = torch.load(path / STATE, map_location="cpu", weights_only=True)
    return state


def tensors(path: Path) -> dict[str, Tensor]:
    """By name, without values: shapes and dtypes."""
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        name: torch.empty(item.size, dtype=item.properties.dtype, device="meta")
        for name, item in stored.items()
        if isinstance(item, TensorStorageMetadata)
    }


def damage(path: Path, group: dist.ProcessGroup | None = None) -> str | None:
    """What is wrong with the files of a checkpoint, in a few words; None if each is what was written.

    Collective over ``group``: each rank reads a part of the files, and all say the same.
    """
    rank, ranks = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
    found = [_damage(path, slice(rank, None, ranks))]
    if group is not None:
        found *= ranks
        dist.all_gather_object(found, found[rank], group=group)
    return next(filter(None, found), None)


def damage_at_a_glance(path: Path) -> str | None:
    """The same without reading the tensors, for any process by itself."""
    return _damage(path, slice(0))


def previous(path: Path) -> Path:
    """Where the checkpoint that ``path`` replaces stands for the moment of the exchange."""
    return path.with_name(f"{path.name}.previous")


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _damage(path: Path, part: slice) -> str | None:
    """
    Args:
        part: of the tensors' files, those to compare with their checksums; the others are small.
    """
    try:
        lines = [line.split("  ") for line in (path / SUMS).read_text().splitlines()]
        sums = {name: digest for digest, name in lines}
    except (OSError, ValueError):
        return f"it has no {SUMS}, or a part of it"
    parts = sorted(file.name for file in path.glob("*.distcp"))
    for name in (_TENSORS, STATE, *parts):
        if name not in sums:
            return f"{SUMS} does not name {name}"
    for name in sums:
        if not (path / name).exists():
            return f"{name} is missing"
    for name in (_TENSORS, STATE, *parts[part]):
        if _sha256(path / name) != sums[name]:
            return f"{name} is not what was written"
    return None


def _empty(folder: Path) -> None:
    remove(folder)
    folder.mkdir(parents=True)


def _write_tensors(
    folder: Path, tensors: Mapping[str, Tensor | Piece], ranks: Ranks | None, rank: int
) -> dict[str, str]:
    """The checksums of the files that this rank wrote."""
    group = ranks.group if ranks else None
    try:
        save(
            dict(tensors),
            storage_writer=FileSystemWriter(folder),
            planner=_Planner(),
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as error:
        raise OfAll(
            "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in sorted(error.failures.items()))
        ) from error
    except RuntimeError as error:  # gloo's
        raise Unanswered from error
    return {path.name: _sha256(path) for path in folder.glob(f"__{rank}_*")}


class _Planner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.__get_tensor_shard__(index) if isinstance(found, Piece) else super().lookup_object(index)


def _finish(path: Path, partial: Path, state: dict[str, Any], sums: list[dict[str, str]]) -> None:
    torch.save(state, partial / STATE)
    whole = {name: digest for written in sums for name, digest in written.items()}
    whole |= {name: _sha256(partial / name) for name in (_TENSORS, STATE)}
    (partial / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in sorted(whole.items())))
    for name in (STATE, SUMS):
        _to_disk(partial / name)
    _to_disk(partial)
    remove(previous(path))
    if path.exists():
        os.replace(path, previous(path))
    os.replace(partial, path)
    _to_disk(path.parent)
    remove(previous(path))


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _together(ranks: Ranks | None, what: str, action: Callable[[], Any]) -> list[Any]:
    """The results of all ranks, on rank 0; where an action fails, every rank fails, and none waits for it."""
    try:
        if ranks is None:
            return [action()]
        ranks.writing.take(what, action)
    except OSError as error:
        told = f"rank 0: {error}" if ranks is None and not isinstance(error, OfAll) else str(error)
        raise UnwrittenCheckpoint(f"the checkpoint could not be written: {told}") from error
    except LostRank as error:
        raise LostRank(f"the checkpoint could not be written: {error}") from error.__cause__
    return ranks.writing.results(range(ranks.writing.world_size) if ranks.writing.rank == 0 else ())
