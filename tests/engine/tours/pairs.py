"""What is run of all that could be switched: the ways to train in chains, and the pairs of choices."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product

from tests.engine.conftest import PLAIN
from tests.engine.tables import matrix
from tests.engine.tiny import LANGUAGE, LANGUAGE_MODEL, RUN, TEXT
from tests.engine.ways import PLAN, WAYS, Way

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


# By how a model is kept, choices of conf/strategy that its rows take in turn.
STRATEGIES = {
    "single": ("single", "auto"),
    "ddp": ("ddp", "ddp_spawn"),
    "fsdp": ("fsdp", "fsdp_grad_op", "fsdp_hybrid", "fsdp_offload"),
    "fsdp_tp": ("fsdp_tp",),
    "ZeRO 1": ("deepspeed_stage_1", "deepspeed_stage_1_offload"),
    "ZeRO 2": ("deepspeed_stage_2", "deepspeed", "deepspeed_stage_2_offload"),
    "ZeRO 3": ("deepspeed_stage_3", "deepspeed_stage_3_offload"),
}
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-true", "64-true")  # 16-mixed is for GPUs
HALF_FROZEN = "tests.engine.models.language.HalfFrozen"
SHAPES = {
    "tied": (*LANGUAGE, "optimizer.eps=1e-4"),  # of which float16 holds no less
    "untied": (*LANGUAGE, "model.tied=false", "model.bias=true", "optimizer.eps=1e-4"),
    "half frozen": (f"model._target_={HALF_FROZEN}", *LANGUAGE_MODEL[1:], TEXT, *RUN, "optimizer.eps=1e-4"),
    "without blocks": (*PLAIN, *RUN, "data.noise=0.1", "model.eps=1e-4"),
}
BATCHES = {"whole": "micro_batch_size=null", "accumulated": "micro_batch_size=6"}
CALLBACKS = {  # beside the default ones
    "measured": ("callbacks=[default,grad_norm,step_times,early_stopping]",),
    "averages": ("callbacks=[default,ema]", "callbacks.ema.decay=0.8"),
    "trainable only": ("callbacks=[default,trainable_only]",),
}
COMPILED = {"eager": (), "compiled": ("compile=true", "compile.backend=eager")}  # aot_eager: strategies/
FACTORS = {
    **{"strategy": list(STRATEGIES), "precision": list(PRECISIONS), "shape": list(SHAPES)},
    **{"batch": list(BATCHES), "callbacks": list(CALLBACKS), "compile": list(COMPILED)},
}
PLANS = (PLAN, PLAN.replace("LanguageModel", "HalfFrozen"))
ZERO = [strategy for strategy in STRATEGIES if strategy.startswith("ZeRO")]
REFUSED = {  # by two choices that don't go together: how preflight's line begins
    **{(zero, "16-true"): "precision=16-true is for GPUs under DeepSpeed; use bf16-true" for zero in ZERO},
    **{(zero, "64-true"): "precision=64-true is not for DeepSpeed; use strategy=ddp" for zero in ZERO},
    ("fsdp_tp", "16-true"): "strategy=fsdp_tp steps float16 weights in float16",
    ("fsdp_tp", "without blocks"): "strategy=fsdp_tp has no plan for PlainModel, only for GPT, ",
}
REFUSED_ONCE_BUILT = ("ZeRO 3", "without blocks", "compiled")  # strategies/test_compilation.py has its line
Pair = tuple[str, str]  # values of two factors, whose values all differ


@dataclass(frozen=True)
class Row:
    values: tuple[str, ...]  # of FACTORS, in order
    strategy: str  # the choice of conf/strategy

    @property
    def ranks(self) -> int:
        """Return how many are started; none where the run starts them itself."""
        return {"single": 0, "auto": 0, "ddp_spawn": 0, "fsdp_hybrid": 4}.get(self.strategy, 2)

    def words(self) -> tuple[str, ...]:
        """Return what to type."""
        _, precision, shape, batch, callbacks, compiled = self.values
        own = {**matrix.EXTRA, "ddp_spawn": ("trainer.devices=2",), "fsdp_tp": PLANS}.get(self.strategy, ())
        chosen = (f"strategy={self.strategy}", f"precision={precision}", "trainer.accelerator=cpu", *own)
        return (*SHAPES[shape], BATCHES[batch], *CALLBACKS[callbacks], *COMPILED[compiled], *chosen)


def pairs_of(values: Sequence[str]) -> set[Pair]:
    """Return the pairs of values in a row, or in a part of one."""
    return set(combinations(values, 2))


def all_pairs() -> set[Pair]:
    return {pair for one, other in combinations(FACTORS.values(), 2) for pair in product(one, other)}


@cache
def rows() -> list[Row]:
    """Return rows in which every pair that is not refused is at least once.

    Each is the one with the most pairs that are missing; first come strategies at precisions, of which there are most.
    """
    refused = [{*values} for values in (*REFUSED, REFUSED_ONCE_BUILT)]
    every = {row: pairs_of(row) for row in product(*FACTORS.values()) if not any(no <= {*row} for no in refused)}
    missing = all_pairs() - REFUSED.keys()
    turns: Counter[str] = Counter()
    made = []
    while missing:
        every = {row: pairs & missing for row, pairs in every.items() if pairs & missing}
        values = max(every, key=lambda row: len(every[row]) + 9 * (row[:2] in missing) - ("compiled" in row))
        missing -= every[values]
        choices = STRATEGIES[values[0]]
        made.append(Row(values, choices[turns[values[0]] % len(choices)]))
        turns[values[0]] += 1
    return made
