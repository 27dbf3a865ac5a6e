"""Checks that the parts of a run go together: model, data, callbacks and strategy, once their constructors have run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig

from lightswitch.batches.plan import BatchPlan
from lightswitch.config.overrides import typed_keys
from lightswitch.context import RunContext
from lightswitch.errors import Refused
from lightswitch.launch import callbacks
from lightswitch.launch.instantiation import instantiated
from lightswitch.strategies import known_callbacks

_CLIPPING = "trainer.gradient_clip_val"


def problems(model: Any, data: Any, cfg: DictConfig, run: RunContext, plan: BatchPlan) -> Iterator[Refused]:
    """Yield why a model and its data can't be trained as the config asks for."""
    yield from _of_other_kinds(model, data, cfg)
    if not getattr(model, "automatic_optimization", True):
        yield from _by_hand(model, cfg, run, plan)


def trainer_problems(trainer: Trainer, model: LightningModule, cfg: DictConfig) -> Iterator[str]:
    """Yield why a Trainer's strategy can't run on its devices, or model and callbacks not with it."""
    yield from _without_gpus(trainer)
    if cfg.mode == "fit":
        yield from _clips_pieces(model, trainer.strategy, trainer.num_nodes * trainer.num_devices)
    yield from known_callbacks.refused(trainer)


def problems_elsewhere(
    cfg: DictConfig, run: RunContext, plan: BatchPlan, strategy: Strategy, devices: int
) -> list[Refused]:
    """Return what a start on other devices than this machine's would be refused for; the model is built on meta.

    Args:
        devices: of the run, over all nodes.
    """
    refusals: list[Refused] = []
    with torch.device("meta"):
        model = instantiated(cfg, "model", refusals)
    data, nodes = (instantiated(cfg, name, refusals) for name in ("data", "callbacks"))
    if refusals:
        return refusals
    users = callbacks.of_config(nodes, cfg.trainer)
    refusals += problems(model, data, cfg, run, plan)
    refusals += map(Refused, _clips_pieces(model, strategy, devices))
    refusals += map(Refused, known_callbacks.problems(users, strategy, devices))
    return refusals


def clipping(model: LightningModule, cfg: DictConfig, run: RunContext) -> dict[str, Any]:
    """Return the Trainer's argument that turns clipping off: where the module optimizes by hand, as Lightning can't
    clip there, and where it clips itself, which Lightning refuses beside a value of the Trainer's that nobody typed."""
    return {"gradient_clip_val": None} if not model.automatic_optimization or leaves_default(model, cfg, run) else {}


def leaves_default(model: LightningModule, cfg: DictConfig, run: RunContext) -> bool:
    """Return whether a module clips gradients itself, and a value that nobody typed is left out for it."""
    clips_itself = is_overridden("configure_gradient_clipping", model)
    return clips_itself and bool(cfg.trainer.get("gradient_clip_val")) and _CLIPPING not in typed_keys(run.hydra)


def _of_other_kinds(model: Any, data: Any, cfg: DictConfig) -> Iterator[Refused]:
    """Yield that the config's code has made no LightningModule or LightningDataModule, or that there is no data."""
    for name, made, kind in (("model", model, LightningModule), ("data", data, LightningDataModule)):
        if made is not None and not isinstance(made, kind):
            found, target = type(made).__name__, cfg[name].get("_target_")
            hint = "" if "pytorch_lightning" not in str(type(made).__mro__) else ", not pytorch_lightning's"
            yield Refused(
                f"{name}._target_={target}: found a {found}, expected lightning.pytorch's {kind.__name__}{hint}"
            )
    trains_without = data is None and cfg.mode == "fit" and isinstance(model, LightningModule)
    if trains_without and not is_overridden("train_dataloader", model):
        yield Refused(f"there is no data, and {type(model).__name__} has no train_dataloader; type data=NAME")


def _by_hand(model: LightningModule, cfg: DictConfig, run: RunContext, plan: BatchPlan) -> Iterator[Refused]:
    """Yield what Lightning does not do for a module that optimizes by hand: accumulate, and clip gradients."""
    name = f"{type(model).__name__} optimizes by hand"
    if plan.accumulation > 1:
        size = plan.micro_batch * plan.replicas
        instead = f"leave it out, or type global_batch_size={size} for steps of that size"
        yield Refused(f"micro_batch_size={plan.micro_batch}: {name}, in each micro batch; {instead}")
    if cfg.trainer.get("gradient_clip_val") and _CLIPPING in typed_keys(run.hydra):  # a default is left out: `clipping`
        instead = f"call self.clip_gradients in its training_step, and leave {_CLIPPING} out"
        yield Refused(f"{_CLIPPING}: {name}, which Lightning does not clip; {instead}")


def _without_gpus(trainer: Trainer) -> Iterator[str]:
    """Yield that Lightning's FSDPStrategy needs GPUs: Lightning's own check misses the subclass that `hooked` makes."""
    if FSDPStrategy in type(trainer.strategy).__bases__ and trainer.strategy.root_device.type != "cuda":
        yield "trainer.strategy: Lightning's FSDPStrategy takes GPUs alone; use strategy=fsdp, which takes CPUs too"


def _clips_pieces(model: LightningModule, strategy: Strategy, devices: int) -> Iterator[str]:
    """Yield that a module clips gradients itself where it would see none, or a device's part of them."""
    if not model.automatic_optimization or not is_overridden("configure_gradient_clipping", model):
        return
    name = f"{type(model).__name__} clips gradients itself, in configure_gradient_clipping"
    if isinstance(strategy, DeepSpeedStrategy):
        yield f"{name}, and DeepSpeed keeps them to itself; use strategy=ddp or fsdp"
    elif isinstance(strategy, FSDPStrategy) and devices > 1 and strategy.sharding_strategy.name != "NO_SHARD":
        yield f"{name}, where fsdp1 gives each device a part of them, by whose norm it would; use strategy=ddp or fsdp"
