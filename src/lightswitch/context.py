"""What a process knows of its run: made once, in launch/entry, and handed down."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf

from lightswitch.cluster.placement import Placement
from lightswitch.process.signals import Signals
from lightswitch.process.state import Process


@dataclass(frozen=True)
class RunContext:
    """One start of one run, as one of its processes sees it.

    Args:
        run_dir: where all that the run writes goes.
        run_id: the name of that directory, which the processes of a run share.
        mode: fit, validate, test or predict.
        placement: who started this process, and which one of how many it is.
        hydra: Hydra's own part of the composed config: overrides, choices, log files, where configs were found.
        process: what changes in this process.
        signals: what this process has been asked by signals.
    """

    run_dir: Path
    run_id: str
    mode: str
    placement: Placement
    hydra: HydraConf
    process: Process
    signals: Signals

    @classmethod
    def of(
        cls, cfg: DictConfig, hydra: HydraConf, placement: Placement, process: Process, signals: Signals
    ) -> RunContext:
        """Take from a composed config what it says of the run."""
        return cls(
            Path(hydra.runtime.output_dir),
            str(cfg.get("run_id")),
            str(cfg.get("mode")),
            placement,
            hydra,
            process,
            signals,
        )

    @property
    def is_first(self) -> bool:
        """Whether this process is rank 0, which speaks and writes for all."""
        return self.placement.rank == 0

    @property
    def job_logging(self) -> dict[str, Any]:
        """What `logging.config.dictConfig` takes."""
        settings: Any = OmegaConf.to_container(self.hydra.job_logging, resolve=True)
        return dict(settings)
