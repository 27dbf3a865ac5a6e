"""Promise 1: what measured/matrix.md says of every strategy at every precision still holds on CPUs, by any launcher.

Requests are checked here in one process; what trains is trained in tours/test_pairs.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightswitch.cluster.placement import Placement
from tests.engine.requests import composed, composing, problems
from tests.engine.tables.matrix import CELLS, EXTRA, PRECISIONS, RUN, STRATEGIES
from tests.night import at_night

TABLE = json.loads(CELLS.read_text())["cpu"]
PLACES = {  # the launcher's processes, and those asked for where there is none
    "one": (Placement("local"), 1),
    "two": (Placement("local"), 2),
    "torchrun": (Placement("torchrun", 1, 4), 4),
    "srun": (Placement("slurm", 2, 4), 4),
    "env": (Placement("env", 2, 2), 2),
}


def test_the_table_is_of_all_strategies_and_precisions() -> None:
    assert list(TABLE) == STRATEGIES
    assert all(tuple(row) == PRECISIONS for row in TABLE.values())


def test_nothing_fails_or_diverges() -> None:
    """A cell trains, or is refused by preflight; anything else would begin so."""
    odd = ("fails: ", "its loss is not finite")
    assert [found for row in TABLE.values() for found in row.values() if found.startswith(odd)] == []


def _refused_by_place(strategy: str, place: Placement, devices: int) -> set[str]:
    """At any precision."""
    nodes, starter = place.nodes, {"torchrun": "torchrun", "slurm": "srun"}.get(place.launcher)
    if strategy == "ddp_spawn" and starter:
        return {f"strategy=ddp_spawn starts the ranks itself, and {starter} has started them; use strategy=ddp"}
    if strategy == "ddp_spawn" and nodes > 1:
        return {f"strategy=ddp_spawn starts the ranks of one machine, not of {nodes} nodes; use strategy=ddp"}
    if strategy == "single" and nodes * devices > 1:
        return {f"strategy=single uses one device, but {nodes} × {devices} are requested; use strategy=ddp"}
    if strategy == "fsdp_hybrid" and devices < 2:
        return {"trainer.strategy.shard_size=2 does not divide 1 devices; use one of 1"}
    if strategy == "fsdp_tp" and devices < 2:
        told = "does not divide 1 × 1 devices; use trainer.devices=2 or a multiple of it"
        return {f"trainer.strategy.tensor_parallel_size=2 {told}"}
    return set()


BY_DAY = ("single", "ddp", "ddp_spawn", "fsdp", "fsdp_hybrid", "fsdp_tp", "deepspeed_stage_2")


@pytest.mark.parametrize("strategy", [*BY_DAY, *at_night(*(one for one in STRATEGIES if one not in BY_DAY))])
def test_a_request_is_accepted_or_refused_in_the_same_lines_by_any_launcher(strategy: str, tmp_path: Path) -> None:
    with composing():
        asked = (f"strategy={strategy}", "trainer.accelerator=cpu", *EXTRA.get(strategy, ()))
        request = composed(*RUN, *asked, into=tmp_path)
        for precision, found in TABLE[strategy].items():
            for name, (place, devices) in PLACES.items() if precision == PRECISIONS[0] else [("two", PLACES["two"])]:
                request.cfg.trainer.update(precision=precision, devices=devices)
                expected = _refused_by_place(strategy, place, devices) | {found} - {"trains"}
                assert problems(request, place) == expected, f"{precision}, {name}"
