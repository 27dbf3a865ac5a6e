"""What an earlier start of a run has left in its directory, as far as it can be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]  # PyYAML has no types of its own


def yaml(path: Path) -> Any:
    """None where there is no such file, or it is harmed."""
    try:
        return OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, ValueError, YAMLError, OmegaConfBaseException):
        return None
