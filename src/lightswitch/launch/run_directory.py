"""What is needed to repeat a run, kept beside its results."""

from __future__ import annotations

import itertools
import json
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from lightswitch.launch import finished

_PACKAGES = ("lightswitch", "torch", "lightning", "torchmetrics", "hydra-core", "deepspeed", "numpy")


@rank_zero_only
def record(cfg: DictConfig) -> None:
    """Write ``.hydra/``, ``config.yaml``, with every value resolved, and ``run.json``: commit, versions, command."""
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    if cfg.mode == "fit":
        finished.forget()
    if cfg.resume == "never":
        _set_checkpoints_aside(run_dir)
    _save_composition(cfg, run_dir / ".hydra")
    OmegaConf.save(cfg, run_dir / "config.yaml", resolve=True)
    told = {
        "command": shlex.join([sys.executable, *sys.argv]),
        "overrides": list(HydraConfig.get().overrides.task),
        "folder": str(Path.cwd()),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "python": platform.python_version(),
        "host": platform.node(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }
    (run_dir / "run.json").write_text(json.dumps(told, indent=2) + "\n")


def _set_checkpoints_aside(run_dir: Path) -> None:
    """A run that starts anew where another stood: the other's are ahead of it, and would be taken for its newest."""
    if (checkpoints := run_dir / "checkpoints").exists():
        aside = (run_dir / f"checkpoints_{number}" for number in itertools.count(1))
        checkpoints.rename(next(path for path in aside if not path.exists()))


def _save_composition(cfg: DictConfig, folder: Path) -> None:
    """The files that Hydra writes as soon as it has composed a config, over those of an earlier run."""
    folder.mkdir(exist_ok=True)
    OmegaConf.save(cfg, folder / "config.yaml")
    OmegaConf.save({"hydra": HydraConfig.get()}, folder / "hydra.yaml")
    OmegaConf.save(HydraConfig.get().overrides.task, folder / "overrides.yaml")


def _git(*arguments: str) -> str | None:
    code = Path(sys.argv[0]).resolve().parent
    try:
        done = subprocess.run(["git", "-C", str(code), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
