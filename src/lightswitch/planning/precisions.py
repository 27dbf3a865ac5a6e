"""The precisions that a plan compares: what was asked for, or else those that the device computes faster in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightswitch.planning.device import Device

UNASKED = "32-true"  # of a run of which nobody said it
ALL = "all"
_FASTER = {"bf16": "bf16-mixed", "fp16": "16-mixed"}  # by the arithmetic of a device; the first that it has


@dataclass(frozen=True)
class Precision:
    """A precision, and how it is chosen.

    Attributes:
        name: as it is typed.
        value: of ``trainer.precision``: a name of Lightning's, or the node of a plugin.
    """

    name: str
    value: Any


def compared(asked: object, files: Mapping[str, Path], device: Device, is_chosen: bool) -> list[Precision]:
    """Return the precisions to plan in; none where it is the run's alone.

    Args:
        asked: plan.precisions: names, ``all`` of them, or None.
        files: of the config folders' precisions, by name.
        is_chosen: whether the run's own was asked for. If not, it is compared with the one in which the device is
            faster and the weights stay in 32 bits.
    """
    names = list(files) if asked == ALL else named(asked)
    if asked is None and not is_chosen:
        faster = [name for arithmetic, name in _FASTER.items() if arithmetic in device.tflops and name in files]
        names = [UNASKED, *faster[:1]] if faster and UNASKED in files else []
    return [Precision(name, _value(files[name])) for name in dict.fromkeys(names)]


def named(asked: object) -> list[str]:
    """Return the names in plan.precisions, which is a list, one name, or None."""
    those: Iterable[object] = asked if isinstance(asked, Sequence) and not isinstance(asked, str) else [asked]
    return [str(name) for name in those if name is not None]


def _value(path: Path) -> Any:
    loaded: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    return loaded.get("precision")


def problems(precision: str, device: Device) -> Iterator[str]:
    """Yield that a device has no arithmetic in a precision: torch emulates bfloat16, more slowly than 32 bits."""
    if precision.startswith("bf16") and device.tflops and "bf16" not in device.tflops:
        told = f"{device.name} has no bfloat16, and torch would emulate it"
        yield f"precision={precision}: {told}; use 16-mixed or 32-true"
