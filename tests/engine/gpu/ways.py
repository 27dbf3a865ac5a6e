"""Ways to spread a run over the devices that are there."""

from __future__ import annotations

from tests.engine.gpu.cells import Scale
from tests.engine.ways import WAYS, Way

ON_ONE = {
    "ddp × 1": Way(("strategy=ddp",), 1),
    "fsdp × 1": Way(("strategy=fsdp",), 1),
    "fsdp_offload × 1": Way(("strategy=fsdp_offload",), 1),
}
TINY = ("single", "ddp × 2")
ALONE = "single"


def there(scale: Scale) -> dict[str, Way]:
    """Return the ways by name, `single` first."""
    found = {name: way for name, way in {**WAYS, **ON_ONE}.items() if way.ranks <= scale.devices}
    return {name: way for name, way in found.items() if not scale.is_tiny or name in TINY}


def lacking(scale: Scale) -> list[tuple[str, str]]:
    """Return those that need more devices, by name, and why they are not run."""
    more = {name: way.ranks for name, way in WAYS.items() if way.ranks > scale.devices}
    return [] if scale.is_tiny else [(name, f"needs {ranks} GPUs") for name, ranks in more.items()]
