"""Export to a folder for Hugging Face's libraries, of a model that can convert itself to theirs (`to_hf`)."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule

from lightswitch import regular_files, versions
from lightswitch.checkpoints import directory, weight_files
from lightswitch.config.confidential import masked_override
from lightswitch.errors import Refused, printable
from lightswitch.export.models import load
from lightswitch.monitoring.display import escaped
from lightswitch.regular_files import MARK, make_tree, remove_tree

CARD = "README.md"


def write(checkpoint: Path, folder: Path, dtype: torch.dtype | None, shard_bytes: int) -> list[Path]:
    """Write the model of a checkpoint to a temporary folder, compare the written files with it, and rename the folder.

    The whole model is in memory, twice during the comparison.

    Args:
        folder: the folder to write, which must not exist.
        dtype: the dtype to round floating-point tensors to; None for their own.
        shard_bytes: maximum size of one file, unless a single tensor is larger.

    Returns:
        the files, sorted by name.

    Raises:
        OSError: the disk is full, or returns other data than was written.
        Refused: the model can't be converted, or a value is beyond the range of ``dtype``.
    """
    parts = _parts(load(checkpoint))
    if dtype is not None:
        _cast(parts[0], dtype)
    partial = make_tree(directory.vacant(folder.with_name(f"{folder.name}.partial")))
    try:
        parts[0].save_pretrained(partial, max_shard_size=shard_bytes)
        for part in parts[1:]:
            part.save_pretrained(partial)
        (partial / CARD).write_text(_card(checkpoint, parts[0]), encoding="utf-8")
        _compare(parts[0], partial)
    except BaseException:
        remove_tree(partial)
        raise
    (partial / MARK).unlink()
    partial.replace(folder)
    return sorted(folder.iterdir())


def _parts(model: LightningModule) -> list[Any]:
    """Return the objects to save: a model of transformers, and its companions such as a tokenizer."""
    name = type(model).__name__
    to_hf: Any = getattr(model, "to_hf", None)
    if to_hf is None:
        raise Refused(
            f"{name} has no method to_hf, which returns the equivalent transformers model; leave out --format"
        )
    try:
        return list(to_hf())
    except (ValueError, ModuleNotFoundError) as error:
        raise Refused(f"{name}: {error}") from error


def _cast(model: Any, dtype: torch.dtype) -> None:
    finite = {name: bool(value.isfinite().all()) for name, value in model.state_dict().items()}
    model.to(dtype)
    for name, value in model.state_dict().items():
        if finite[name] and not value.isfinite().all():
            raise Refused(f"{name} has values beyond the range of {dtype}; use --dtype float32, or bfloat16")


def _compare(model: Any, folder: Path) -> None:
    """Read the folder with `from_pretrained`, as its users do, and compare every tensor."""
    read: Any = type(model).from_pretrained(folder, local_files_only=True).state_dict()
    for name, value in model.state_dict().items():
        if name not in read or not weight_files.same_bits(read[name], value):
            raise OSError(f"{folder.name}: read back different data for {name} than was written")


def _card(checkpoint: Path, model: Any) -> str:
    """Return the model card: the class, the training command and the last metrics."""
    run_dir = next((up for up in checkpoint.resolve().parents[:2] if (up / "run.json").is_file()), None)
    record, results = (_read(run_dir / name) if run_dir else {} for name in ("run.json", "results.json"))
    return "\n".join(_lines(type(model).__name__, record, results)) + "\n"


def _lines(name: str, record: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[str]:
    yield from ("---", "library_name: transformers", "tags: [lightswitch]", "---", f"# {name}", "")
    version = versions.of(["lightswitch"]).get("lightswitch", "")
    typed = record.get("overrides")
    overrides = shlex.join(masked_override(str(one)) for one in typed) if isinstance(typed, list) else ""
    commit = f" at commit {escaped(str(record['commit']))}" if record.get("commit") else ""
    command = " ".join(printable(f"python train.py {overrides}").split())
    yield from (f"Trained with lightswitch {version}{commit}:", "", f"<pre>{escape(command, quote=False)}</pre>", "")
    if results:
        yield from ("| metric | last value |", "| --- | --- |")
        yield from (
            f"| {escaped(metric)} | {value:.4g} |" for metric, value in results.items() if isinstance(value, float)
        )


def _read(file: Path) -> dict[str, Any]:
    try:
        found = regular_files.read_json(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
