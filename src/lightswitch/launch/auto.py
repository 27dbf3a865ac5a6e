"""Whether a run asks for strategy=auto or micro_batch_size=auto, which fitting.py decides."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightswitch.batches.plan import BatchPlan
from lightswitch.config.values import AUTO
from lightswitch.context import RunContext
from lightswitch.preflight import devices


def decide(cfg: DictConfig, run: RunContext, batch: BatchPlan) -> BatchPlan:
    """Put what `auto` stands for, strategy and micro batch, into a composed config; return the batch.

    What a run takes is simulated only where it is asked for: no other run imports the code of plans.

    Raises:
        Refused: nothing fits; the text says what would.
    """
    asks_for_micro_batch = cfg.micro_batch_size == AUTO
    if asks_for_micro_batch:  # strategy=auto takes the largest where nobody says one
        cfg.micro_batch_size = None
    if not (asks_for_micro_batch or _asks_for_strategy(cfg)):
        return batch

    from lightswitch.launch import fitting

    if _asks_for_strategy(cfg) and (decided := fitting.strategy(cfg, run)) is not None:
        return decided
    return fitting.largest_micro_batch(cfg, run) if asks_for_micro_batch and cfg.mode != "plan" else batch


def _asks_for_strategy(cfg: DictConfig) -> bool:
    """Return whether strategy=auto is to be decided; for CPUs, only where plan.device or plan.memory_gib are told."""
    strategy, plan = cfg.trainer.get("strategy"), cfg.get("plan")
    if cfg.mode == "plan" or plan is None or not isinstance(strategy, DictConfig):
        return False
    if str(strategy.get("_target_")) != "lightswitch.strategies.auto.auto":
        return False
    is_told = plan.memory_gib is not None or str(plan.device.get("_target_")).endswith(".Device")
    plain: Any = OmegaConf.to_container(cfg.trainer, resolve=True)
    return is_told or devices.accelerator(plain) == "cuda"
