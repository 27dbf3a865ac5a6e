"""Ways to train, in chains: what is begun under one is killed, and goes on under the next."""

from __future__ import annotations

import os

from tests.engine.ways import WAYS, Way

SEED = int(os.environ.get("TOUR_SEED", 0))  # of the moments of the kills


def _offloads(stage: int) -> Way:
    return Way((f"strategy=deepspeed_stage_{stage}_offload",), 2)


RING = {  # in chains of three; ranks=0 starts its processes itself
    "fsdp_hybrid 2 × 2": WAYS["fsdp_hybrid 2 × 2"],
    "deepspeed_stage_3 × 2": WAYS["deepspeed_stage_3 × 2"],
    "ddp × 2 by script": Way(("strategy=ddp", "trainer.devices=2"), 0),
    "ddp_spawn × 3": Way(("strategy=ddp_spawn", "trainer.devices=3", "micro_batch_size=4"), 0),
    "fsdp_tp 2 × 2": WAYS["fsdp_tp 2 × 2"],
    "fsdp × 2": WAYS["fsdp × 2"],
    "deepspeed_stage_1 × 2": WAYS["deepspeed_stage_1 × 2"],
    "single": WAYS["single"],
    "deepspeed_stage_3_offload × 2": _offloads(3),
    "fsdp_offload × 2": Way(("strategy=fsdp_offload",), 2),
    "deepspeed_stage_1_offload × 2": _offloads(1),
    "ddp × 4": WAYS["ddp × 4"],
    "fsdp_grad_op × 2": WAYS["fsdp_grad_op × 2"],
    "deepspeed_stage_2_offload × 2": _offloads(2),
    "deepspeed_stage_2 × 1": WAYS["deepspeed_stage_2 × 1"],
}
CHAINS = [list(RING)[start : start + 3] for start in range(0, len(RING), 3)]
BY_DAY = 2  # chains: each launcher, and each way to shard, once
