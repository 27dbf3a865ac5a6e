"""A module of the catalogue under a way to train: begun, stopped at a save, resumed under others, and exported."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import OmegaConf
from torch import Tensor

import lightswitch
from lightswitch.checkpoints.last import LastCheckpoints
from lightswitch.errors import Refused
from lightswitch.export.__main__ import main as export
from lightswitch.launch.build import in_order, trainer_problems
from lightswitch.monitoring.metrics import MetricsFile
from tests.engine.fits import Fit
from tests.engine.modules.catalogue import CATALOGUE, MICRO, SINGLE, Entry
from tests.pool import Pool, RankFailed

SAVED, END = 3, 6  # optimizer steps
TOLERANCE = 1e-5  # of a loss or a weight, relative
WAYS = {  # as Fit names strategies; at two ranks
    **{name: name for name in ("ddp", "fsdp")},
    "fsdp_tp": "fsdp_tp plans.{}=tests.engine.modules.sequence.cut",
    **{f"ZeRO {stage}": f"deepspeed_stage_{stage}" for stage in (1, 2, 3)},
}

Columns = dict[str, dict[int, float]]


class NoCheckpoint(Exception):
    """A run has come to its end and saved nothing."""


@dataclass(frozen=True)
class Ended:
    """A run that has come to its end.

    Attributes:
        columns: metrics by name and step.
        folder: that its checkpoints are in, by step.
    """

    columns: Columns
    folder: Path

    def checkpoints(self) -> list[Path]:
        """Return the saves, the first one at about half of the run."""
        found = sorted(self.folder.glob("step_*.ckpt"), key=lambda path: int(path.stem.removeprefix("step_")))
        if not found:
            raise NoCheckpoint("it has ended without a checkpoint")
        return found


@dataclass(frozen=True)
class Cell:
    """What a module does under a way.

    Attributes:
        outcome: holds, refused, differs or fails.
        told: the largest difference, relative; the line of the refusal; or what differs or fails.
    """

    outcome: str
    told: str


class Walk:
    """Runs of modules, each of which is held to a run of reference."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        self._pool, self._folder, self._count = pool, folder, 0
        self.reference = cache(self._reference)

    def cell(self, name: str, way: str, goes_back: bool = True) -> Cell:
        """Train a module under a way; resume there what the reference saved, and with the reference what it saved.

        Args:
            goes_back: without it, the last of these is left out.
        """
        entry = CATALOGUE[name]
        try:
            expected = self.reference(name)
            whole = self._fit(entry, way)
            runs = {"": whole}
            if entry.resumes:
                runs[", resumed"] = self._fit(entry, way, expected.checkpoints()[0])
            if entry.resumes and goes_back:
                runs[f", resumed by {entry.reference}"] = self._fit(entry, entry.reference, whole.checkpoints()[0])
            found = {when: differences(entry, expected, run) for when, run in runs.items()}
        except RankFailed as failed:
            if isinstance(failed.error, Refused):
                return Cell("refused", str(failed.error))
            error = failed.error or failed
            return Cell("fails", f"{type(error).__name__}: {error}".partition("\n")[0])
        except NoCheckpoint as error:
            return Cell("fails", str(error))
        for when, values in found.items():
            if told := [f"{value:.0e} in {name}" for name, value in values.items() if value > TOLERANCE]:
                return Cell("differs", ", ".join(told) + when)
        return Cell("holds", f"{max(max(values.values()) for values in found.values()):.0e}")

    def _reference(self, name: str) -> Ended:
        return self._fit(CATALOGUE[name], CATALOGUE[name].reference)

    def _fit(self, entry: Entry, way: str, checkpoint: Path | None = None) -> Ended:
        self._count += 1
        folder = self._folder / f"{entry.name}_{self._count}"
        ranks = 1 if way in (SINGLE, MICRO) else 2
        return self._pool(ranks)(trained, entry.name, way, folder, checkpoint)[0]


@contextmanager
def walk(pool: Pool) -> Iterator[Walk]:
    """Give a walk whose checkpoints are removed at the end."""
    with TemporaryDirectory(prefix="modules_") as folder:
        yield Walk(pool, Path(folder))


# In a rank


def trained(name: str, way: str, folder: Path, checkpoint: Path | None) -> Ended:
    """Train a module to its end, from a checkpoint if there is one."""
    entry = CATALOGUE[name]
    pl.seed_everything(1 if checkpoint is None else 2, workers=True, verbose=False)
    module, data = entry.module(), entry.data()
    is_clipped = entry.is_clipped and module.automatic_optimization
    is_clipped = is_clipped and not is_overridden("configure_gradient_clipping", module)
    fit = Fit(
        entry.module,
        entry.data,
        strategy=WAYS.get(way, "single").format(name),
        global_batch=8,
        micro_batch=4 if way == MICRO else None,
        steps=END,
        arguments=f"gradient_clip_val={0.5 if is_clipped else 'null'} max_epochs=4",
    )
    saves = LastCheckpoints(str(folder / "checkpoints"), every_n_steps=SAVED, keep=9)
    trainer = replace(fit, agrees=True).trainer(saves, logger=_default_loggers(folder))
    if told := list(trainer_problems(trainer, module, OmegaConf.create({"mode": "fit"}))):  # as train.py asks
        raise Refused("\n".join(told))
    trainer.fit(module, data, ckpt_path=checkpoint)
    if dist.is_initialized():
        dist.barrier()  # the pool ends a rank that has used DeepSpeed, which may be the one that has the others' store
    return Ended(_columns(folder / "metrics.csv"), folder / "checkpoints")


def _columns(path: Path) -> Columns:
    with path.open() as file:
        rows = list(csv.DictReader(file))
    names = [name for name in rows[0] if name != "step"]
    return {name: {int(row["step"]): float(row[name]) for row in rows if row[name]} for name in names}


def _default_loggers(folder: Path) -> list[Logger]:
    return in_order({"csv": MetricsFile(folder), "tensorboard": TensorBoardLogger(folder, "", "tensorboard")})


# What two runs have in common


def differences(entry: Entry, expected: Ended, found: Ended) -> dict[str, float]:
    """Return the largest relative difference of each metric, and of the exported tensors together.

    A resumed run has the metrics of its own steps alone.
    """
    apart = {name: float("inf") for name in expected.columns.keys() - found.columns.keys()}
    for name in expected.columns.keys() & found.columns.keys():
        steps = expected.columns[name].keys() & found.columns[name].keys()
        pairs = [(torch.tensor(one.columns[name][step]) for one in (found, expected)) for step in steps]
        apart[name] = max((_relative(*pair) for pair in pairs), default=0.0)
    weights, others = exported(entry, found), exported(entry, expected)
    assert weights.keys() == others.keys()
    return {"weights": max(_relative(weights[name], tensor) for name, tensor in others.items()), **apart}


def _relative(found: Tensor, expected: Tensor) -> float:
    """Of the largest number, where that is not tiny."""
    if not expected.numel():
        return 0.0
    found, expected = found.double(), expected.double()
    apart = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-2))
    return apart if apart == apart else float("inf")


def exported(entry: Entry, run: Ended) -> dict[str, Tensor]:
    """Return the weights of the last checkpoint, as the export writes them and `lightswitch.load` reads them."""
    file = run.folder.parent / "exported.pt"
    if not file.exists():
        target = f"{entry.module.__module__}.{entry.name}"
        (run.folder.parent / "config.yaml").write_text(f"model:\n  _target_: {target}\n")
        export([str(run.checkpoints()[-1]), "-o", str(file)])
        lightswitch.load(file)
    return {name: value for name, value in torch.load(file).items() if isinstance(value, Tensor)}
