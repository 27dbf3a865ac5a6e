"""Ways to train in a ring: what is begun under one is killed, and goes on under the next."""

from __future__ import annotations

import os
from datetime import date

from tests.engine.ways import WAYS, Way

# The ring's turn and the moments of the kills change by the day; TOUR_SEED=N repeats those of another.
SEED = int(os.environ.get("TOUR_SEED") or date.today().toordinal())


def _offloads(stage: int) -> Way:
    return Way((f"strategy=deepspeed_stage_{stage}_offload",), 2)


RING = {  # neighbours are of different kinds; ranks=0 starts its processes itself
    "single": WAYS["single"],
    "fsdp × 2": WAYS["fsdp × 2"],
    "deepspeed_stage_1 × 2": WAYS["deepspeed_stage_1 × 2"],
    "ddp × 2 by script": Way(("strategy=ddp", "trainer.devices=2"), 0),
    "deepspeed_stage_2_offload × 2": _offloads(2),
    "fsdp_hybrid 2 × 2": WAYS["fsdp_hybrid 2 × 2"],
    "ddp × 3": Way(("strategy=ddp", "micro_batch_size=4"), 3),
    "deepspeed_stage_3 × 2": WAYS["deepspeed_stage_3 × 2"],
    "fsdp_offload × 2": Way(("strategy=fsdp_offload",), 2),
    "deepspeed_stage_1_offload × 2": _offloads(1),
    "fsdp_tp 2 × 2": WAYS["fsdp_tp 2 × 2"],
    "deepspeed_stage_2 × 1": WAYS["deepspeed_stage_2 × 1"],
    "ddp × 4": WAYS["ddp × 4"],
    "fsdp_grad_op × 2": WAYS["fsdp_grad_op × 2"],
    "deepspeed_stage_3_offload × 2": _offloads(3),
}


def next_way(way: str, seed: int = SEED) -> str:
    """Return the way that follows one in the ring, which has a turn for each other way: all pairs in as many days."""
    names = list(RING)
    turn = 1 + seed % (len(names) - 1)
    return names[(names.index(way) + turn) % len(names)]
