"""Every way to spread a run over processes: what to type, and how many of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Way:
    switches: tuple[str, ...]
    ranks: int = 1


PLAN = "trainer.strategy.plans.LanguageModel=tests.engine.models.language.tensor_parallel"
TENSOR_PARALLEL = ("strategy=fsdp_tp", "trainer.strategy.tensor_parallel_size=2", PLAN)
WAYS = {
    "single": Way(("strategy=single",)),
    "ddp × 2": Way(("strategy=ddp",), 2),
    "ddp × 4": Way(("strategy=ddp",), 4),
    "ddp_spawn × 2": Way(("strategy=ddp_spawn", "trainer.devices=2"), 0),
    "fsdp × 2": Way(("strategy=fsdp",), 2),
    "fsdp × 4": Way(("strategy=fsdp",), 4),
    "fsdp_grad_op × 2": Way(("strategy=fsdp_grad_op",), 2),
    "fsdp_hybrid 2 × 2": Way(("strategy=fsdp_hybrid", "trainer.strategy.shard_size=2"), 4),
    "deepspeed_stage_1 × 1": Way(("strategy=deepspeed_stage_1",), 1),
    "deepspeed_stage_1 × 2": Way(("strategy=deepspeed_stage_1",), 2),
    "deepspeed_stage_2 × 1": Way(("strategy=deepspeed_stage_2",), 1),
    "deepspeed_stage_2 × 2": Way(("strategy=deepspeed_stage_2",), 2),
    "deepspeed_stage_3 × 1": Way(("strategy=deepspeed_stage_3",), 1),
    "deepspeed_stage_3 × 2": Way(("strategy=deepspeed_stage_3",), 2),
    "fsdp_tp 2 × 2": Way(TENSOR_PARALLEL, 4),
}
