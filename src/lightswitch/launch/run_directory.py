"""What is needed to repeat a run, kept beside its results."""

from __future__ import annotations

import itertools
import json
import platform
import shlex
import subprocess
import sys
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Callback, LightningModule, Trainer
from omegaconf import DictConfig, OmegaConf

from lightswitch.launch import confidential, finished, placement, versions

_PACKAGES = ("lightswitch", "torch", "lightning", "torchmetrics", "hydra-core", "deepspeed", "numpy")


class RunRecord(Callback):
    """Writes ``.hydra/``, ``config.yaml``, with every value resolved, and ``run.json``: commit, versions, command.

    What the config takes from the environment stays an interpolation in all of them.

    Made where Hydra is, and written where the run is, which may be a process that Python spawned, and once nothing is
    wrong with any process of it: until then an earlier run's files stay as they were.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.run_dir = Path(HydraConfig.get().runtime.output_dir)
        self.mode, self.resume = cfg.mode, cfg.resume
        self.files = _files(cfg) if placement.detect().rank == 0 else {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != self.mode or not trainer.is_global_zero:  # a test after fit is the same run
            return
        if self.mode == "fit":
            finished.forget(self.run_dir)
        if self.resume == "never":
            _set_checkpoints_aside(self.run_dir)
        for name, text in self.files.items():
            (self.run_dir / name).parent.mkdir(parents=True, exist_ok=True)
            (self.run_dir / name).write_text(text)


def _files(cfg: DictConfig) -> dict[str, str]:
    hydra = HydraConfig.get()
    told = {
        "command": shlex.join([sys.executable, *sys.argv]),
        "overrides": confidential.overrides(hydra),
        "folder": str(Path.cwd()),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "python": platform.python_version(),
        "host": platform.node(),
        "packages": versions.of(_PACKAGES),
    }
    return {  # the first three as Hydra writes them as soon as it has composed a config
        ".hydra/config.yaml": OmegaConf.to_yaml(cfg),
        ".hydra/hydra.yaml": OmegaConf.to_yaml(OmegaConf.create({"hydra": hydra})),
        ".hydra/overrides.yaml": OmegaConf.to_yaml(hydra.overrides.task),
        "config.yaml": OmegaConf.to_yaml(confidential.written(cfg)),
        "run.json": json.dumps(told, indent=2) + "\n",
    }


def _set_checkpoints_aside(run_dir: Path) -> None:
    """A run that starts anew where another stood: the other's are ahead of it, and would be taken for its newest."""
    if (checkpoints := run_dir / "checkpoints").exists():
        aside = (run_dir / f"checkpoints_{number}" for number in itertools.count(1))
        checkpoints.rename(next(path for path in aside if not path.exists()))


def _git(*arguments: str) -> str | None:
    code = Path(sys.argv[0]).resolve().parent
    try:
        done = subprocess.run(["git", "-C", str(code), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
