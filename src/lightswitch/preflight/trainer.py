"""Arguments of Lightning's Trainer that the engine sets, or that a run can't follow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

_DERIVED = {  # what sets it
    "accumulate_grad_batches": "the batch: set micro_batch_size",
    "callbacks": "the group callbacks: type callbacks=[default,early_stopping] or ~callbacks.throughput",
    "logger": "the group logger: type logger=[default,mlflow] or ~logger.tensorboard",
    "plugins": "the group cluster: type cluster=torchrun or another of it",
}
_REFUSED = {
    "barebones": "it leaves out checkpoints and loggers, which a run goes on from and is known by; type "
    "trainer.enable_checkpointing=false and trainer.enable_progress_bar=false",
    "model_registry": "it is of Lightning's own checkpoint callback, which the engine's takes the place of; leave it "
    "out",
    "use_distributed_sampler": "the engine cuts batches, so that their order is the same at any number of devices; "
    "leave it out",
}


def problems(trainer: Mapping[str, Any], typed: Set[str]) -> Iterator[str]:
    """Yield the arguments that would not do what they say, and what to type instead.

    Args:
        trainer: the Trainer's node, resolved.
        typed: the keys on the command line.
    """
    for argument, source in _DERIVED.items():
        if argument in trainer:
            yield f"trainer.{argument} follows from {source}, and leave it out"
    for argument, reason in _REFUSED.items():
        if trainer.get(argument):
            yield f"trainer.{argument}={_shown(trainer[argument])}: {reason}"
    if isinstance(steps := trainer.get("max_steps"), int) and (steps == 0 or steps < -1):
        yield f"trainer.max_steps={steps}: use a number from 1, or -1 with trainer.max_epochs=N"
    for argument in ("val_check_interval", "check_val_every_n_epoch"):
        if (interval := trainer.get(argument)) == 0 and type(interval) is not float:
            yield f"trainer.{argument}=0: use a number from 1; trainer.limit_val_batches=0 leaves validation out"
    if "trainer.default_root_dir" in typed:
        yield "trainer.default_root_dir: a run is in runs/NAME/RUN_ID; type name=NAME and run_id=RUN_ID instead"


def _shown(value: object) -> str:
    return "true" if value is True else str(value)
