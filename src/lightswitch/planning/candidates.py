"""The strategies that a plan compares: the one that was chosen, or each that the config folder has."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from hydra.utils import get_class
from omegaconf import OmegaConf

_RECOMPUTES = "activation_checkpointing"
_ORDER = ("single", "ddp", "fsdp_grad_op", "fsdp_hybrid", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2")


@dataclass(frozen=True)
class Candidate:
    """A strategy, and how it is chosen.

    Attributes:
        words: of the command line.
        node: of the config: the class, and its arguments.
    """

    words: tuple[str, ...]
    node: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Return what tables call it: fsdp, or fsdp with activation checkpointing."""
        name = self.words[0].partition("=")[2]
        return f"{name} with activation checkpointing" if len(self.words) > 1 else name

    @property
    def offloads(self) -> bool:
        """Whether what training changes is kept in the host's memory."""
        return bool(self.node.get("cpu_offload"))

    def recomputing(self) -> Candidate | None:
        """Return it with activation checkpointing; None where it has that already, or can't."""
        if self.node.get(_RECOMPUTES) or _RECOMPUTES not in _arguments(self.node):
            return None
        return Candidate((*self.words, f"trainer.strategy.{_RECOMPUTES}=true"), {**self.node, _RECOMPUTES: True})


def chosen(choice: str, node: Mapping[str, Any]) -> list[Candidate]:
    """Return the one strategy that was asked for, with its arguments as given."""
    return [Candidate((f"strategy={choice}",), node)]


def every(hydra: HydraConf) -> list[Candidate]:
    """Return every strategy of the config folders that is a class by itself, the simplest first.

    Left out are those that differ from another one only in how processes are started, or lack a value.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for path in _files(hydra):
        loaded: Any = OmegaConf.load(path)
        node: Any = OmegaConf.to_container(loaded.get("strategy"), resolve=False)
        if isinstance(node, dict) and "???" not in node.values() and "start_method" not in node:
            found.setdefault(path.stem, node)
    named = sorted(found, key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name))
    return [Candidate((f"strategy={name}",), found[name]) for name in named if _is_class(found[name])]


def _files(hydra: HydraConf) -> Iterator[Path]:
    for source in hydra.runtime.config_sources:
        if source.schema == "file":
            yield from sorted((Path(source.path) / "strategy").glob("*.yaml"))


def _is_class(node: Mapping[str, Any]) -> bool:
    """Return whether a node names a class: a function, as that of auto, returns one of the others."""
    try:
        get_class(str(node.get("_target_")))
    except (ImportError, ValueError):  # of an optional package; or no class
        return False
    return "deepspeed" not in str(node["_target_"])


def _arguments(node: Mapping[str, Any]) -> set[str]:
    """Return the names of a strategy's arguments; those of FSDP also for a subclass that hands options on."""
    classes = get_class(str(node["_target_"])).__mro__
    return {name for cls in classes if "__init__" in vars(cls) for name in inspect.signature(cls).parameters}
