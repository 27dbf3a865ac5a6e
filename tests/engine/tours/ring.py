"""Ways to train, in chains: what is begun under one is killed, and goes on under the next."""

from __future__ import annotations

import os
from datetime import date
from random import Random

from tests.engine.ways import WAYS, Way

# The chains and the moments of the kills change by the day; TOUR_SEED=N repeats those of another.
SEED = int(os.environ.get("TOUR_SEED") or date.today().toordinal())


def _offloads(stage: int) -> Way:
    return Way((f"strategy=deepspeed_stage_{stage}_offload",), 2)


RING = {  # ranks=0 starts its processes itself
    "single": WAYS["single"],
    "fsdp × 2": WAYS["fsdp × 2"],
    "deepspeed_stage_1 × 2": WAYS["deepspeed_stage_1 × 2"],
    "ddp × 2 by script": Way(("strategy=ddp", "trainer.devices=2"), 0),
    "deepspeed_stage_2_offload × 2": _offloads(2),
    "fsdp_hybrid 2 × 2": WAYS["fsdp_hybrid 2 × 2"],
    "ddp_spawn × 3": Way(("strategy=ddp_spawn", "trainer.devices=3", "micro_batch_size=4"), 0),
    "deepspeed_stage_3 × 2": WAYS["deepspeed_stage_3 × 2"],
    "fsdp_offload × 2": Way(("strategy=fsdp_offload",), 2),
    "deepspeed_stage_1_offload × 2": _offloads(1),
    "fsdp_tp 2 × 2": WAYS["fsdp_tp 2 × 2"],
    "deepspeed_stage_2 × 1": WAYS["deepspeed_stage_2 × 1"],
    "ddp × 4": WAYS["ddp × 4"],
    "fsdp_grad_op × 2": WAYS["fsdp_grad_op × 2"],
    "deepspeed_stage_3_offload × 2": _offloads(3),
}


def chains(seed: int = SEED) -> list[list[str]]:
    """Return the ways in chains of three, drawn anew each day."""
    names = list(RING)
    Random(seed).shuffle(names)
    return [names[start : start + 3] for start in range(0, len(names), 3)]
