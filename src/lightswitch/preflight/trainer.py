"""Checks of Trainer arguments that the engine sets or can't support, and of the precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

from lightswitch.config import aliases
from lightswitch.preflight.planned import MODES
from lightswitch.preflight.signatures import signature

_DERIVED = {  # what sets each argument
    "accumulate_grad_batches": "the batch: type {}",
    "callbacks": "the group callbacks: type callbacks=[default,early_stopping] or ~callbacks.throughput",
    "logger": "the group logger: type logger=[default,mlflow] or ~logger.tensorboard",
    "plugins": "the group cluster: type cluster=torchrun or another of its choices",
}
_REFUSED = {
    "barebones": "it disables checkpoints and loggers, which a run needs to resume and to record metrics; type "
    "trainer.enable_checkpointing=false and trainer.enable_progress_bar=false",
    "model_registry": "it is an option of Lightning's checkpoint callback, which the engine replaces; leave it out",
    "use_distributed_sampler": "the engine distributes the samples itself, in the same order for any number of "
    "devices; leave it out",
}
_SMALLEST_FLOAT16 = 2.0**-14  # the smallest normal number, 6.1e-5


def problems(trainer: Mapping[str, Any], typed: Set[str]) -> Iterator[str]:
    """Yield the arguments that would not have their documented effect, and what to type instead.

    Args:
        trainer: the Trainer's node, resolved.
        typed: the keys on the command line.
    """
    for argument, source in _DERIVED.items():
        if argument in trainer:
            meant = aliases.instead(argument, str(trainer[argument]))
            yield f"trainer.{argument} is set by {source.format(meant)}"
    for argument, reason in _REFUSED.items():
        if trainer.get(argument):
            yield f"trainer.{argument}={_shown(trainer[argument])}: {reason}"
    if isinstance(steps := trainer.get("max_steps"), int) and (steps == 0 or steps < -1):
        yield f"trainer.max_steps={steps}: use a number from 1, or -1 with trainer.max_epochs=N"
    for argument in ("val_check_interval", "check_val_every_n_epoch"):
        if (interval := trainer.get(argument)) == 0 and type(interval) is not float:
            yield f"trainer.{argument}=0: use a number from 1; trainer.limit_val_batches=0 disables validation"
    counts_steps = "check_val_every_n_epoch" in trainer and trainer["check_val_every_n_epoch"] is None
    if counts_steps and type(interval := trainer.get("val_check_interval")) is float:
        yield (
            f"trainer.val_check_interval={interval} is a part of an epoch; type trainer.check_val_every_n_epoch=1 as "
            "well, or a number of steps"
        )
    if "trainer.default_root_dir" in typed:
        yield "trainer.default_root_dir: a run writes to runs/NAME/RUN_ID; type name=NAME and run_id=RUN_ID instead"


def _shown(value: object) -> str:
    return "true" if value is True else str(value)


def precision_problems(cfg: dict[str, Any], accelerator: str) -> Iterator[str]:
    """Yield the reasons why the precision can't be used.

    Args:
        cfg: the whole config, resolved.
        accelerator: the one in use: cpu, cuda, mps or tpu.
    """
    precision = cfg["trainer"].get("precision")
    if accelerator == "cpu" and precision in (16, "16", "16-mixed"):
        yield f"precision={precision} is for GPUs, and Lightning would put bf16-mixed in its place; use that on the CPU"
    if accelerator == "mps" and precision in (64, "64", "64-true"):
        yield f"precision={precision}: Apple's GPUs have no 64-bit floats; use 32-true, or trainer.accelerator=cpu"
    keeps_float32 = "DeepSpeed" in str(cfg["trainer"].get("strategy"))  # its optimizers step in 32 bits
    trains = cfg["mode"] in ("fit", *MODES)
    if precision == "16-true" and not keeps_float32 and trains:
        yield from _vanishing_eps(cfg)
    if precision in (16, "16", "16-mixed") and cfg["trainer"].get("gradient_clip_val") and trains:
        yield from _unscaled_too_late(cfg)


def _unscaled_too_late(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield a problem for optimizers that unscale gradients in step(), after clipping: torch's with ``fused=True``."""
    for key, node in cfg["model"].items():
        if isinstance(node, dict) and node.get("fused") is True:
            path = "optimizer" if node == cfg.get("optimizer") else f"model.{key}"
            yield (
                f"{path}.fused=true: under precision=16-mixed a fused optimizer unscales gradients after they are "
                f"clipped; leave it out (the engine fuses Adam in another way), or type trainer.gradient_clip_val=null"
            )


def _vanishing_eps(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield a problem for optimizers such as Adam that divide by √v + eps if both are 0 in float16: NaN at step 2."""
    for key, node in cfg["model"].items():
        if not isinstance(node, dict) or not _has_eps_below(_SMALLEST_FLOAT16, node):
            continue
        path = "optimizer" if node == cfg.get("optimizer") else f"model.{key}"
        found = f"eps={node['eps']:g}" if "eps" in node else "default eps"
        yield (
            f"precision=16-true: {node['_target_'].rpartition('.')[2]} divides by its eps, and the {found} is below "
            f"float16's smallest number, 6.1e-05; use {path}.eps=1e-4, or precision=bf16-true"
        )


def _has_eps_below(smallest: float, node: dict[str, Any]) -> bool:
    """Return whether a node creates an optimizer with a single eps below a number; without an eps in the node it does,
    because torch's defaults are all small."""
    accepted = signature(node["_target_"]) if isinstance(node.get("_target_"), str) else None
    if accepted is None or not {"lr", "eps"} <= accepted.parameters.keys():
        return False
    kinds = accepted.parameters["eps"].kinds
    return (kinds is None or float in kinds) and node.get("eps", 0.0) < smallest
