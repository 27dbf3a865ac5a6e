"""The runs by which a way to train is measured: whole, killed and resumed, resumed elsewhere, exported."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lightswitch.checking.comparison import States, states
from lightswitch.checking.runs import Ended, Starter
from lightswitch.errors import Refused

EQUAL = "equal"  # of an export


@dataclass(frozen=True)
class Way:
    """A way to train: a strategy at some devices.

    Attributes:
        words: overrides that choose it.
    """

    name: str
    words: tuple[str, ...]
    ranks: int


class Start(Protocol):
    """Function that starts a run of a way, and returns what is left of it."""

    def __call__(self, way: Way, name: str, resume: Path | None = None, **probe: Any) -> Ended:
        """Start it.

        Args:
            name: of its folder.
            resume: the checkpoint that it goes on from.
            probe: further arguments of the probe.
        """


@dataclass(frozen=True)
class Measured:
    """Runs of a way, and what became of them.

    Attributes:
        whole: the run from start to end.
        killed: the same, whose ranks have killed themselves.
        resumed: from the checkpoint that the killed one has left, in the same way; None where it left none.
        elsewhere: from the same checkpoint, in one process; None where it left none, or the way is one process.
        exported: "equal" where the export of its last checkpoint loads with equal weights, else what is wrong with it.
    """

    way: Way
    whole: Ended
    killed: Ended | None = None
    resumed: Ended | None = None
    elsewhere: Ended | None = None
    exported: str = EQUAL
    states: Mapping[str, States] = field(default_factory=dict)

    @property
    def is_trained(self) -> bool:
        return self.whole.code == 0 and bool(self.states["whole"])


def measure(start: Start, starter: Starter, way: Way, steps: int, single: Way) -> Measured:
    """Run a way, kill it after half of its steps and resume it, and export what it has saved."""
    whole = start(way, "whole")
    if whole.code or not states(whole.moments):
        return Measured(way, whole, states={"whole": states(whole.moments)})
    killed = start(way, "killed", kill_after_step=steps // 2 + 1)
    checkpoint = killed.run_dir / "checkpoints" / "last.ckpt"
    resumed = elsewhere = None
    if checkpoint.exists():
        checkpoint = checkpoint.resolve()
        if way != single:
            elsewhere = start(single, f"{way.name}_elsewhere", resume=checkpoint)
        resumed = start(way, "resumed", resume=checkpoint)
    exported = starter.call(exports, whole.run_dir) or "the process that loads it has ended"
    runs = {"whole": whole, "killed": killed, "resumed": resumed, "elsewhere": elsewhere}
    found = {name: states(run.moments) for name, run in runs.items() if run is not None}
    return Measured(way, whole, killed, resumed, elsewhere, exported, found)


def exports(run_dir: Path) -> str:
    """Export a run's last checkpoint, load it, and return what is wrong with it in a line, or EQUAL."""
    from lightswitch.checkpoints import names
    from lightswitch.export import files, source
    from lightswitch.export.files import Weights
    from lightswitch.export.model import load

    checkpoint = run_dir / "checkpoints" / "last.ckpt"
    if not checkpoint.exists():
        return "there is no checkpoint"
    try:
        weights = Weights(checkpoint)
        file = run_dir / ("exported.pt" if weights.extra_state else "exported.safetensors")
        node = source.model_config(checkpoint, trust=True).node
        files.write(weights, node, file, None, 5 * 10**9, {}, lambda count: None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = load(file, trust=True)
        found = names.state_of(model)
        saved = weights.read(weights.like)
        for name, tensor in saved.items():
            if name not in found or not files.same_bits(found[name].contiguous(), tensor):
                return f"{name} is not what was saved"
    except Refused as refusal:
        return str(refusal)
    except Exception as error:  # the module's own constructor may raise any
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return EQUAL
