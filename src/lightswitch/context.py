"""RunContext, the facts about a run in one of its processes: made once in launch/hydra_entry and passed down."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hydra.conf import HydraConf

from lightswitch.cluster.placement import Placement
from lightswitch.process import Process, Signals


@dataclass(frozen=True)
class RunContext:
    """Description of one start of a run in one of its processes.

    Args:
        run_dir: the directory to which the run writes.
        run_id: the name of that directory, the same in all processes of the run.
        mode: fit, validate, test, predict, plan, dry_run or check.
        placement: the launcher that started this process, and its rank.
        hydra: the `hydra` node of the composed config: overrides, choices, log files, config folders.
        process: the mutable state of this process.
        signals: the signals that this process has received.
    """

    run_dir: Path
    run_id: str
    mode: str
    placement: Placement
    hydra: HydraConf
    process: Process
    signals: Signals

    @property
    def is_first(self) -> bool:
        """Whether this process is rank 0, which prints and writes for all ranks."""
        return self.placement.rank == 0
