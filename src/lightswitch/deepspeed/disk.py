"""DeepSpeed's offload to disk: a folder for each run, writes that can't be lost, and files as tensors.

DeepSpeed writes each flat group of parameters, each of its optimizer states, and each large parameter that computes to
a file of its own, and reads it into a buffer when a step needs it (deepspeed.runtime.swap_tensor, 0.19). In between,
its tensors are empty.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lightswitch import patches
from lightswitch.deepspeed.config import blocks_on_disk
from lightswitch.deepspeed.quiet_import import deepspeed
from lightswitch.errors import Refused
from lightswitch.regular_files import make_tree, remove_tree
from lightswitch.strategies.units import is_compiled

_OPERATOR = "async_io"
_CAP_IPC_LOCK = 14  # may lock any amount of memory (linux/capability.h)


def folder_of(drive: str | Path, run_dir: Path) -> Path:
    """Return the folder of a run on a drive; runs of the same name in other directories have others."""
    digest = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()
    return Path(drive) / f"{run_dir.name}_{digest[:8]}"


def open_folder(folder: Path, rank: int, is_first_of_node: bool) -> None:
    """Make a run's folder, without the files of a killed start, and remove this rank's files when the process ends.

    The other ranks wait for the first of their node.

    Raises:
        Refused: the folder can't be made.
    """
    try:
        if is_first_of_node:
            if folder.is_dir():
                remove_tree(folder)
            with suppress(FileExistsError):  # another node may share the drive
                make_tree(folder)
    except OSError as error:
        raise Refused(f"trainer.strategy.nvme_path={folder.parent}: {error.strerror}; use another folder") from error
    atexit.register(_remove, folder, rank)


def _remove(folder: Path, rank: int) -> None:
    for path in folder.glob(f"**/rank{rank}/**/*"):
        if path.is_file():
            path.unlink(missing_ok=True)
    with suppress(OSError, Refused):  # another rank still has files there, and removes the folder
        for path in sorted(set(folder.glob("**")) - {folder}, reverse=True):
            path.rmdir()
        remove_tree(folder)


def load_operator() -> None:
    """Load DeepSpeed's operator that reads and writes files, with writes that reserve their space on the disk.

    DeepSpeed ignores the result of a write (0.19): on a full disk, it would read back other values.
    """
    logging.disable(logging.INFO)  # setuptools logs the commands by which it looks for libaio
    try:
        found = deepspeed.ops.op_builder.AsyncIOBuilder().load(verbose=False)
    finally:
        logging.disable(logging.NOTSET)
    if isinstance(found, SimpleNamespace):
        return

    class Handle(found.aio_handle):  # type: ignore[misc, name-defined]  # compiled
        def async_pwrite(self, buffer: Tensor, path: str, offset: int) -> int:
            reserve(path, buffer.nbytes)
            return int(super().async_pwrite(buffer, path, offset))

    operator = SimpleNamespace(**{**vars(found), "aio_handle": Handle})
    builder = deepspeed.ops.op_builder.builder.OpBuilder
    patches.replace(builder, "_loaded_ops", {**builder._loaded_ops, _OPERATOR: operator})


def reserve(path: str | Path, size_bytes: int) -> None:
    """Make a file of at least this size, whose space on the disk is its own.

    Raises:
        Refused: the disk is full, or the file can't be made.
    """
    with suppress(OSError):
        if os.stat(path).st_size >= size_bytes:
            return
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)  # as DeepSpeed opens it
        try:
            os.posix_fallocate(file, 0, size_bytes)
        finally:
            os.close(file)
    except OSError as error:
        with suppress(OSError):
            os.unlink(path)  # it may have taken all space that was left
        raise Refused(
            f"trainer.strategy.nvme_path: {path} of {size_bytes / 2**30:.3g} GiB: {error.strerror}; free some space, "
            "or use a folder on another local drive"
        ) from error


def fit_buffers(zero: dict[str, Any], model: nn.Module, ranks: int) -> None:
    """Make the buffers for parameters as large as the largest shard of one, and enough of them: DeepSpeed fails if one
    is too small, or if it has none left for a layer that follows another.

    Args:
        zero: the block `zero_optimization` of DeepSpeed's config.

    Raises:
        Refused: the process may not lock the memory of the buffers, for which DeepSpeed would abort.
    """
    shards = [-(-int(getattr(one, "ds_numel", one.numel())) // ranks) for one in model.parameters()]
    elements = 0
    for block in blocks_on_disk(zero):
        is_of_weights = block is zero.get("offload_param")
        if is_of_weights:
            block["buffer_size"] = max(shards)
            most = max(len(list(part.parameters(recurse=is_compiled(part)))) for part in model.modules())
            block["buffer_count"] = max(block.get("buffer_count", 5), 2 * most)
        size = max(shards) if is_of_weights else min(sum(shards), zero.get("sub_group_size", 1e9) + max(shards))
        elements += block.get("buffer_count", 5) * size
    limit, needed = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], int(elements) * 4
    if resource.RLIM_INFINITY != limit < needed and not _may_lock_memory():
        raise Refused(
            f"each process locks {needed >> 20} MiB of memory to offload to disk, but may lock {limit >> 20} MiB "
            "(ulimit -l); raise memlock in /etc/security/limits.conf, or start the container with --ulimit memlock=-1"
        )


def _may_lock_memory() -> bool:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    effective = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> _CAP_IPC_LOCK & 1)


@contextmanager
def mapped(zero: Any, module: nn.Module) -> Iterator[None]:
    """Context in which the tensors that DeepSpeed has written to disk have their values: they map the files.

    Views of them remain valid until DeepSpeed writes the files again; what is written into them is in the files.

    Args:
        zero: DeepSpeed's optimizer.
    """
    found: list[tuple[Any, str, int, torch.dtype, Tensor]] = [
        (one.compute_tensor, one.swap_path, info.numel(), zero.optimizer_swapper.dtype, torch.empty(0))
        for info in _groups(zero).values()
        for one in info.tensors
    ]
    weights: list[Any] = [one for one in module.parameters() if _is_on_disk(one)]
    for parameter in weights:
        kept, swapper = parameter.ds_tensor, parameter.nvme_swapper
        found.append((kept, swapper.get_path(parameter), kept.ds_numel, swapper.dtype, swapper.invalid_buffer))
    for tensor, path, elements, dtype, _ in found:
        tensor.data = _map(path, elements, dtype)
    yield  # no try/finally: an error ends the run
    for tensor, *_, placeholder in found:
        tensor.data = placeholder.data  # as DeepSpeed leaves it


def new_state(zero: Any, flat: Tensor, key: str) -> Tensor | None:
    """Return an optimizer state of zeros that maps a new file, for a flat group that is on disk; None for another."""
    info = _groups(zero).get(getattr(flat, "ds_id", None))
    if info is None:
        return None
    tensor: Any = torch.empty(0, dtype=flat.dtype)
    tensor.ds_id = f"{key}-{flat.ds_id}"  # type: ignore[attr-defined]  # as DeepSpeed names it
    info.add_state_tensors([tensor])
    path = info.tensors[-1].swap_path
    reserve(path, zero.optimizer_swapper._io_aligned_numel(info.numel()) * flat.itemsize)
    tensor.data = _map(path, info.numel(), flat.dtype)
    state: Tensor = tensor
    return state


def is_mapped(tensor: Tensor) -> bool:
    """Return whether a tensor maps a file."""
    return tensor.untyped_storage().filename is not None


def _groups(zero: Any) -> dict[Any, Any]:
    """Return what DeepSpeed has on disk of each flat group, by the group's `ds_id`."""
    swapper = getattr(zero, "optimizer_swapper", None)
    return dict(swapper.swap_params_info) if swapper is not None else {}


def _is_on_disk(parameter: Any) -> bool:
    """Return whether this rank's shard of a parameter is in a file alone, after letting go of one read ahead."""
    swapper, kept = getattr(parameter, "nvme_swapper", None), getattr(parameter, "ds_tensor", None)
    if swapper is None or kept is None or kept.final_location != "nvme":
        return False
    swapper.synchronize_reads()
    if parameter.ds_status.name == "NOT_AVAILABLE" and kept.status.name == "AVAILABLE":
        swapper.remove_partition_and_release_buffers([parameter])
    return bool(kept.status.name == "NOT_AVAILABLE")


def _map(path: str, elements: int, dtype: torch.dtype) -> Tensor:
    return torch.from_file(path, shared=True, size=elements, dtype=dtype)
