"""Detection of strategy=auto and micro_batch_size=auto, for which fitting.py estimates memory."""

from __future__ import annotations

from omegaconf import DictConfig

from lightswitch.batches.plan import BatchPlan
from lightswitch.config.overrides import AUTO
from lightswitch.context import RunContext
from lightswitch.preflight import devices


def decide(cfg: DictConfig, run: RunContext, batch: BatchPlan) -> BatchPlan:
    """Replace `auto`, as strategy and micro-batch, in a composed config; return the batch.

    Memory is simulated only if the config requires it: other runs don't import the planning code.

    Raises:
        Refused: nothing fits; the text says what would.
    """
    asks_for_micro_batch = cfg.micro_batch_size == AUTO
    if asks_for_micro_batch:  # strategy=auto takes the largest if none is set
        cfg.micro_batch_size = None
    if not (asks_for_micro_batch or _asks_for_strategy(cfg)):
        return batch

    from lightswitch.launch import fitting

    decided = fitting.strategy(cfg, run) if _asks_for_strategy(cfg) else None
    if decided is None and asks_for_micro_batch and cfg.mode != "plan":
        decided = fitting.largest_micro_batch(cfg, run)
    return decided or batch


def _asks_for_strategy(cfg: DictConfig) -> bool:
    """Return whether strategy=auto has to be decided; an evaluation is single or ddp."""
    strategy = cfg.trainer.get("strategy")
    if cfg.mode not in ("fit", "dry_run") or not isinstance(strategy, DictConfig):
        return False
    return str(strategy.get("_target_")) == "lightswitch.strategies.ddp.auto" and _is_memory_known(cfg)


def _is_memory_known(cfg: DictConfig) -> bool:
    """Return whether a device's memory is known; for CPUs, only if plan.device or plan.memory_gib is set."""
    plan = cfg.get("plan")
    if plan is None:
        return False
    is_set = plan.memory_gib is not None or str(plan.device.get("_target_")).endswith(".Device")
    return is_set or devices.accelerator({"accelerator": cfg.trainer.get("accelerator", "auto")}) == "cuda"
