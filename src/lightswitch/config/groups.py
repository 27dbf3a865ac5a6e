"""The choices of a group of the config folders."""

from __future__ import annotations

from pathlib import Path

from hydra.conf import HydraConf


def files(hydra: HydraConf, group: str) -> dict[str, Path]:
    """Return the file of each choice of a group by its name; of two folders with the same, that which Hydra takes."""
    folders = [Path(source.path) for source in hydra.runtime.config_sources if source.schema == "file"]
    found = {path.stem: path for folder in reversed(folders) for path in (folder / group).glob("*.yaml")}
    return dict(sorted(found.items()))
