"""Lightning's own callbacks that a run, or its strategy, can't serve, and what to use instead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy

from lightswitch.errors import RefusedRequest
from lightswitch.strategies.ddp import DDP
from lightswitch.strategies.single import Single

# By name, as an older Lightning lacks some
NOWHERE = {
    "BatchSizeFinder": "the batch is cut by global_batch_size, and what a device takes of it at once does not "
    "change the run; type micro_batch_size=auto for the largest that fits",
    "ModelPruning": "no run could be resumed, as its checkpoints do not fit the module that it prepares; prune in the "
    "module's constructor, by torch.nn.utils.prune",
    "StochasticWeightAveraging": "a resumed run could not follow it, as it replaces the schedule in mid-run; use "
    "lightning.pytorch.callbacks.EMAWeightAveraging",
}
OF_WHOLE_PARAMETERS = {
    "BaseFinetuning": "unfreezes parameters in mid-run",
    "WeightAveraging": "averages whole parameters",
}
OF_LIGHTNINGS_STEPS = {  # DeepSpeed's engine decides when its optimizer steps
    "GradientAccumulationScheduler": "DeepSpeed's accumulation is fixed once it starts; use strategy=fsdp",
    "LearningRateFinder": "DeepSpeed's optimizer can't be made anew at the rate; find it with strategy=fsdp, "
    "which finds the same, and type it",
}
OF_AUTOMATIC_OPTIMIZATION = {
    "GradientAccumulationScheduler": "leave the callback out, and accumulate in training_step",
    "LearningRateFinder": "compare short runs, python train.py -m model.lr=1e-4,1e-3 trainer.max_steps=100",
}
OF_ONE_PROCESS = {
    "OnExceptionCheckpoint": "the other ranks take no part in a save by the one that fails; "
    "type callbacks.last_checkpoint.every_n_steps=N instead",
}


class KnownCallbacks(Callback):
    """Callback that refuses those which the module brings, once they are there."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if problems := list(refused(trainer)):
            raise RefusedRequest(problems)


def refused(trainer: Trainer) -> Iterator[str]:
    """Yield what is wrong with the callbacks of a Trainer under its strategy, and what to use instead."""
    callbacks: Iterable[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set past Lightning's declaration
    module: LightningModule | None = trainer.lightning_module  # None before it is attached
    return problems(callbacks, module, trainer.strategy, trainer.num_nodes * trainer.num_devices)


def problems(
    callbacks: Iterable[Callback], module: LightningModule | None, strategy: Strategy, devices: int
) -> Iterator[str]:
    """Yield the same of callbacks that no Trainer has yet."""
    by_hand = module is not None and not module.automatic_optimization
    for callback in callbacks:
        of_lightning = {base.__name__ for base in type(callback).__mro__ if base.__module__.startswith("lightning.")}
        for name in sorted(of_lightning):
            if told := _problem(name, strategy, devices):
                yield f"{type(callback).__name__}: {told}"
            elif by_hand and name in OF_AUTOMATIC_OPTIMIZATION:
                told = f"{type(module).__name__} optimizes by hand; {OF_AUTOMATIC_OPTIMIZATION[name]}"
                yield f"{type(callback).__name__}: {told}"


def _problem(name: str, strategy: Strategy, devices: int) -> str | None:
    if name in OF_WHOLE_PARAMETERS and not isinstance(strategy, DDP | Single):
        return f"it {OF_WHOLE_PARAMETERS[name]}, which {type(strategy).__name__} does not allow; use strategy=ddp"
    if name in OF_ONE_PROCESS and devices > 1:
        return OF_ONE_PROCESS[name]
    if name in OF_LIGHTNINGS_STEPS and isinstance(strategy, DeepSpeedStrategy):
        return OF_LIGHTNINGS_STEPS[name]
    return NOWHERE.get(name)
