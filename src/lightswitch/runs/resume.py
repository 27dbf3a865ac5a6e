"""Where a run goes on: its earlier starts and its end, what its config changes, and the checkpoint to start from.

``run.json`` in its directory has the starts and the end, ``results.json`` the final metrics. Imports no torch.
"""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from lightswitch import regular_files
from lightswitch.config.confidential import masked
from lightswitch.context import RunContext
from lightswitch.errors import Refused, listed, shown
from lightswitch.runs import claim

if TYPE_CHECKING:
    from lightswitch.batches.plan import Position

log = logging.getLogger(__name__)

RECORD, RESULTS = "run.json", "results.json"


@dataclass(frozen=True)
class Beginning:
    """Checkpoint that a run reads, with its position in training; empty for a run that starts at step 0."""

    path: Path | None = None
    position: Position | None = None

    def __str__(self) -> str:
        assert self.path is not None
        if self.position is None:
            return shown(self.path)
        steps, batches = self.position.steps, self.position.global_step
        return f"{shown(self.path)}, at step {steps}" + ("" if steps == batches else f", batch {batches}")


def find(cfg: DictConfig, run: RunContext) -> Beginning:
    """Find the checkpoint to start from: the newest of a run that is resumed, or the one to evaluate.

    Raises:
        Refused: the checkpoint can't be read or has no position, the run that saved it had another seed or global
            batch size, or this run has saved later ones.
    """
    from lightswitch.checkpoints.last import later_than, newest, position_of  # imports torch

    def read(path: Path) -> Beginning:
        return Beginning(path, position_of(path))

    if cfg.mode != "fit":
        return read(checkpoint(cfg.ckpt_path, run.run_dir))
    if cfg.init_from:
        read(Path(cfg.init_from))
    resume = cfg.ckpt_path or cfg.resume
    if resume == "never":
        return Beginning()
    is_named = resume not in ("auto", "last")
    if is_named:
        found = read(checkpoint(resume, run.run_dir))
    elif (of_run := newest(run.run_dir)) is not None:
        found = Beginning(*of_run)
    elif step := max([last_step(run.run_dir), *(start.step for start in starts(run.run_dir))]):
        raise Refused(
            f"{shown(run.run_dir)} has trained at step {step}, but has no checkpoint; put its folder checkpoints back, "
            "resume another one with resume=PATH, or start over with resume=never"
        )
    else:
        return Beginning()
    assert found.path is not None
    position, path = found.position, shown(found.path)
    lost = position.difference(cfg.seed, cfg.global_batch_size) if position else "it contains no position in the data"
    if lost or position is None:
        raise Refused(
            f"{path} can't be resumed: {lost}; start anew with resume=never or another run_id, "
            f"or from its weights alone with init_from={path} and another run_id"
        )
    is_own = run.run_dir.resolve() in found.path.resolve().parents
    if is_named and (later := later_than(position.global_step if is_own else -1, run.run_dir)):
        raise Refused(
            f"{path} can't be resumed in {shown(run.run_dir)}, which has {later[0].name}: a restart would resume that; "
            "leave out the path to go on from it, or give this run another run_id"
        )
    return found


def checkpoint(name: str, run_dir: Path) -> Path:
    """Return the path of a checkpoint; `last` and `best` are those of the run itself, as in Lightning."""
    return run_dir / "checkpoints" / f"{name}.ckpt" if name in ("last", "best") else Path(name)


@dataclass(frozen=True)
class Start:
    """Start of a run.

    Args:
        step: number of optimizer steps in the checkpoint that it resumes from; 0 without one.
        hosts: machine of each node, in rank order.
        devices: devices of each node.
        trained_twice: steps that the previous start had logged after that checkpoint, and that are trained again.
        job: the job whose launcher may start it again, see `claim.job`; empty for a command that someone has typed.
        uneven: unused; records of earlier versions have it.
    """

    step: int
    hosts: list[str]
    devices: int
    trained_twice: int = 0
    job: str = ""
    uneven: int = 0

    @property
    def size(self) -> int:
        """Number of devices of all nodes."""
        return len(self.hosts) * self.devices

    @property
    def world(self) -> str:
        """Nodes × devices, such as `4 nodes × 2`."""
        return f"{len(self.hosts)} node{'' if len(self.hosts) == 1 else 's'} × {self.devices}"

    def change_from(self, before: Start) -> str:
        """Return the change of the world since another start, in one line; empty if there is none."""
        lost = [host for host in before.hosts if host not in self.hosts]
        joined = [host for host in self.hosts if host not in before.hosts]
        if self.world == before.world and not (len(self.hosts) > 1 and (lost or joined)):  # one node may have moved
            return ""
        named = [f"{verb} {listed(hosts, 'nodes')}" for verb, hosts in (("lost", lost), ("joined by", joined)) if hosts]
        return f"{before.world} → {self.world} at step {self.step}{': ' if named else ''}{', '.join(named)}"


def starts(run_dir: Path) -> list[Start]:
    """Return the starts of a run, the first one first; empty if its record has none or can't be read."""
    try:
        return [regular_files.as_record(one, Start) for one in read_mapping(run_dir / RECORD)["starts"]]
    except (ValueError, TypeError, KeyError):
        return []


def has_saved(run_dir: Path, job: str) -> bool:
    """Return whether the last start in a directory was of a job, and checkpoints are there."""
    is_last = any(start.job == job for start in starts(run_dir)[-1:])
    return is_last and any(path.is_dir() for path in (run_dir / "checkpoints").glob("*.ckpt"))


def logged_steps(run_dir: Path) -> int:
    """Return the number of steps up to the last one of the training in metrics.csv; 0 without one."""
    try:
        text = (run_dir / "metrics.csv").read_text(errors="replace")
        rows = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
        return max((int(row["step"]) + 1 for row in rows if row.get("train/loss")), default=0)
    except (OSError, ValueError, KeyError, csv.Error):
        return 0


@dataclass(frozen=True)
class End:
    """End of a run, as written to run.json.

    Args:
        step: number of optimizer steps that were trained.
        limits: the Trainer's `max_steps`, `max_epochs` and `max_time` when the run ended.
        go_on: command that continues the run under higher limits; null if there is no checkpoint.
    """

    step: int
    limits: dict[str, int | str | None]
    go_on: str | None


def is_finished(cfg: DictConfig, run: RunContext) -> bool:
    """Return whether fit and test have already ended under limits at least as high as this start's.

    All processes of the run get the same result.
    """
    end = ended(run.run_dir)
    if cfg.mode != "fit" or cfg.resume != "auto" or end is None:
        return False
    if _exceed(_limits(cfg), end.limits):
        return False
    if run.is_first:
        changed = changes_since(run.run_dir, cfg)
        otherwise = f", and {changed} has no effect" if changed else ""
        log.info("finished   fit and test have ended at step %d%s; resume=never starts anew", end.step, otherwise)
        if end.go_on or checkpoint("last", run.run_dir).exists():  # without a command, it ended before its limits
            log.info("go on      %s", end.go_on or "resume=last, for example with more patience of early stopping")
        with suppress(Refused):  # removes the lock of a start that was killed after it had written the end
            claim.take(cfg, run)
    return True


def write_end(cfg: DictConfig, run_dir: Path, step: int, go_on: str | None) -> None:
    """Add the end of a run, with its limits, to its record.

    Args:
        go_on: command that continues the run under higher limits.
    """
    end = End(step, _limits(cfg), go_on)
    regular_files.write_json(run_dir / RECORD, {**read_mapping(run_dir / RECORD), "ended": asdict(end)})


def ended(run_dir: Path) -> End | None:
    """Return the end of a run; None if fit and test have not ended, or its record can't be read."""
    try:
        return regular_files.as_record(read_mapping(run_dir / RECORD).get("ended"), End)
    except ValueError:
        return None


def last_step(run_dir: Path) -> int:
    """Return the step at which a run ended; 0 if it has not."""
    end = ended(run_dir)
    return 0 if end is None else end.step


def _limits(cfg: DictConfig) -> dict[str, int | str | None]:
    limits: Any = OmegaConf.to_container(cfg.trainer, resolve=True)
    time = limits.get("max_time")
    counts = {name: limits.get(name) for name in ("max_steps", "max_epochs")}
    return {**counts, "max_time": None if time is None else str(time)}


def _exceed(limits: dict[str, Any], others: dict[str, Any]) -> bool:
    if limits["max_time"] != others.get("max_time"):
        return True
    return any(_count(limits[name]) > _count(others[name]) for name in ("max_steps", "max_epochs") if name in others)


def _count(limit: int | None) -> float:
    return math.inf if limit is None or limit == -1 else limit


def read_results(run_dir: Path) -> dict[str, float]:
    """Return the metrics in results.json; empty if the run has not ended, or the file is damaged."""
    return read_mapping(run_dir / RESULTS)


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON or YAML file; empty if there is none, or the file is damaged."""
    read = regular_files.read_yaml if path.suffix == ".yaml" else regular_files.read_json
    try:
        found = read(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def has_trained(run_dir: Path) -> bool:
    """Return whether a directory has the record of a training, which an evaluation there leaves as it is."""
    return read_mapping(run_dir / "config.yaml").get("mode") == "fit"


_NO_HYPERPARAMETERS = {  # keys that identify the run or set what it logs, not what is trained
    *("name", "run_id", "mode", "resume", "init_from", "init_names", "ckpt_path", "objective", "compare"),
    *("meet_timeout_seconds", "cluster", "callbacks", "logger", "compile", "watch"),
}
_ABSENT = object()


def changes_since(run_dir: Path, cfg: DictConfig) -> str:
    """Return the changes since the earlier config, as in `optimizer.lr=0.001 (was 0.0003), seed=2 (was 1) and 3 more`.

    The text is empty if nothing differs, or the earlier config can't be read.
    """
    before = read_mapping(run_dir / "config.yaml")
    if not before:
        return ""
    now: Any = masked(OmegaConf.to_container(cfg))  # as the earlier one is written
    for group in ("optimizer", "scheduler"):  # a record lacks them if the module has its own
        if group not in before:
            now.pop(group, None)
    strategies = [_class(config.get("trainer", {}).get("strategy")) for config in (before, now)]
    if strategies[0] != strategies[1]:  # the arguments of another class are not compared
        before["trainer"]["strategy"], now["trainer"]["strategy"] = strategies
    then, today = (dict(_leaves(config)) for config in (before, now))
    changes = [_change(key, then.get(key, _ABSENT), value) for key, value in today.items()]
    return listed(sorted(filter(None, changes), key=lambda change: change.startswith("trainer.")))


def _class(strategy: Any) -> str:
    return str(strategy.get("_target_") if isinstance(strategy, dict) else strategy).rpartition(".")[2]


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a config by their dotted keys, in order."""
    if not isinstance(node, dict) or not node:
        yield path, node
        return
    for key, value in node.items():
        if path or key not in _NO_HYPERPARAMETERS:
            yield from _leaves(value, f"{path}.{key}" if path else str(key))


def _change(key: str, before: Any, now: Any) -> str | None:
    if "${" in str(now) or str(before) == str(now):
        return None
    return f"{key}={_text(now)} (was {'not set' if before is _ABSENT else _text(before)})"


def _text(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
