"""Choice of the checkpoint that a run starts from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from lightswitch.batches.plan import Position
from lightswitch.checkpoints.last import newest, position_of
from lightswitch.context import RunContext
from lightswitch.errors import Refused, shown
from lightswitch.runs import finished, saved, starts


@dataclass(frozen=True)
class Start:
    """Checkpoint that a run reads, with its position in training; empty for a run that starts at step 0."""

    path: Path | None = None
    position: Position | None = None

    def __str__(self) -> str:
        assert self.path is not None
        return shown(self.path) + (f", at {_reached(self.position)}" if self.position else "")


def find(cfg: DictConfig, run: RunContext) -> Start:
    """Find the checkpoint to start from: the newest of a run that is resumed, or the one to evaluate.

    Raises:
        Refused: the checkpoint can't be read or has no position, or the run that saved it had another seed or global
            batch size.
    """
    if cfg.mode != "fit":
        return _read(saved.checkpoint(cfg.ckpt_path, run.run_dir))
    if cfg.init_from:
        _read(Path(cfg.init_from))
    start = _to_resume(cfg.ckpt_path or cfg.resume, run.run_dir)
    if start.path is None:
        return start
    position, path = start.position, shown(start.path)
    lost = position.difference(cfg.seed, cfg.global_batch_size) if position else "it contains no position in the data"
    if lost:
        raise Refused(
            f"{path} can't be resumed: {lost}; start anew with resume=never or another run_id, "
            f"or from its weights alone with init_from={path} and another run_id"
        )
    return start


def _reached(position: Position) -> str:
    batches = "" if position.steps == position.global_step else f", batch {position.global_step}"
    return f"step {position.steps}{batches}"


def _to_resume(resume: str, run_dir: Path) -> Start:
    if resume in ("auto", "last"):
        found = newest(run_dir)
        if found is None and (step := _trained_before(run_dir)):
            raise Refused(
                f"{shown(run_dir)} has trained at step {step}, but has no checkpoint; put its folder checkpoints back, "
                "resume another one with resume=PATH, or start over with resume=never"
            )
        return Start(*found or ())
    return Start() if resume == "never" else _read(saved.checkpoint(resume, run_dir))


def _trained_before(run_dir: Path) -> int:
    """Return the last step that a run is known to have reached: where it ended, or from where it was resumed."""
    return max([finished.last_step(run_dir), *(start.step for start in starts.read(run_dir))])


def _read(path: Path) -> Start:
    return Start(path, position_of(path))
