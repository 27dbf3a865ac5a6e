"""What conf offers, read from its files: a model, a dataset or a strategy is tested once its file is there."""

from __future__ import annotations

import re

from omegaconf import OmegaConf

from tests.runs import CHECKOUT

CONF = CHECKOUT / "conf"


def choices(group: str) -> list[str]:
    """Names of the files in a group, the default first."""
    names = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    defaults = [dict(item) for item in OmegaConf.load(CONF / "config.yaml").defaults if item != "_self_"]
    return sorted(names, key=lambda name: {group: name} not in defaults)


def text(group: str, choice: str) -> str:
    return (CONF / group / f"{choice}.yaml").read_text()


def models() -> list[str]:
    """Those whose file names a class; one that changes another's sizes is tested as the other."""
    return [name for name in choices("model") if re.search(r"^_target_:", text("model", name), re.MULTILINE)]
