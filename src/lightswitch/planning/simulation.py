"""Simulate the training steps of one rank with Lightning's loop and the real strategy code, on fake tensors."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric

from lightswitch import patches
from lightswitch.errors import NeedsValues, Refused, Unplanned
from lightswitch.failures.classify import one_line
from lightswitch.loop.loops import replace_loops
from lightswitch.mixins import with_mixin
from lightswitch.planning.collectives import Collective
from lightswitch.planning.estimate import Step
from lightswitch.planning.fakes import (
    Answers,
    Converted,
    FakeCluster,
    World,
    alone,
    fake_group,
    fake_tensors,
    fake_zero,
    has_collectives,
    shards_gradients,
)
from lightswitch.planning.timeline import Growth, Timeline
from lightswitch.planning.tracking import Tracking
from lightswitch.planning.values import Values
from lightswitch.strategies.callbacks import use_fused_steps

_NEEDS_VALUES = (UnsupportedFakeTensorException, UnsupportedOperatorException)
_IN_C = "data is not allocated"  # torch's error message when C++ code reads a fake tensor
_FIRST, _MEASURED, _LARGER = range(3)  # step numbers
_QUIET = ("lightning.pytorch", "lightning.fabric", "lightswitch", "torch.distributed")  # loggers to silence


@dataclass(frozen=True)
class Work:
    """Model and batches of a run, independent of its strategy.

    Attributes:
        model: builds the module.
        batch: returns a micro-batch with the given number of samples.
        is_cut: whether ``batch`` can return any number of samples; if not, all its batches have the same size.
        samples: number of samples in a micro-batch.
        accumulation: number of micro-batches per optimizer step.
        options: additional Trainer arguments.
    """

    model: Callable[[], LightningModule]
    batch: Callable[[int], Any]
    is_cut: bool
    samples: int
    accumulation: int
    options: Mapping[str, Any]


def simulate(
    work: Work, strategy: Strategy, world: World, look: Callable[[Trainer], None] = lambda trainer: None
) -> Step:
    """Simulate training steps of one rank under a strategy and return the measurements of the second step.

    The first step creates the optimizer state. It uses twice as many samples, so that comparing its forward and
    backward passes with those of the second step shows how memory grows with the number of samples. If the two steps
    can't be compared, a third step with twice the samples is run. If batches can't be cut, all steps use the same size.

    Args:
        look: called after the steps, while the process groups still exist.

    Raises:
        NeedsValues: the step reads tensor values, and fails with the guessed ones.
        Refused: the strategy or the module can't run. Their other exceptions propagate unchanged.
        Unplanned: this torch version has no collectives for fake tensors.
    """
    if world.size > 1 and not has_collectives():
        raise Unplanned([f"torch {torch.__version__} has no collectives for simulated tensors; install a newer torch"])
    strategy = alone(strategy)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    answers = [Answers()] if isinstance(strategy, DeepSpeedStrategy) else []
    tracking = Tracking(fake, answers)
    with _quiet(), _processes(strategy, world), fake_zero(strategy, world):
        model, trainer = _prepared(work, strategy, world, tracking, fake)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        try:
            trainer.fit(model, _Batches(work, _sizes(work), fake, tracking))
        except _NEEDS_VALUES as error:
            raise NeedsValues(f"needs tensor values ({error.args[0]})") from error
        except (Refused, NeedsValues):
            raise
        except Exception as error:
            raise _needing(tracking.ledger.values, error) from error
        finally:
            tracking.close()
        step = tracking.step(_MEASURED)
        growth = _growth(work, tracking, step.timeline)
        look(trainer)
    return Step(
        growth=growth,
        samples=work.samples,
        micro_flops=step.flops / work.accumulation,
        micro_collectives=_before_last(step.collectives, strategy),
        last_collectives=step.collectives[-1],
        parameters=parameters,
        parameter_bytes=parameter_bytes,
        optimizer_bytes=_optimizer_bytes(trainer, trained),
        guessed=dict(tracking.ledger.values.guessed),
    )


def _needing(values: Values, error: Exception) -> Exception:
    """Return the error to raise: `NeedsValues` if guessed values may have caused it, else the error unchanged."""
    if _IN_C in str(error):
        return NeedsValues("reads tensor values in C++ code")
    if values.guessed:
        return NeedsValues(
            f"reads tensor values at {next(iter(values.guessed))}, and fails with guessed ones: {one_line(error)}"
        )
    return error


def _sizes(work: Work) -> tuple[int, ...]:
    """Return the micro-batch size of each step. The third step runs only if the first two can't be compared."""
    larger = 2 * work.samples if work.is_cut else work.samples
    return (larger, work.samples, larger)


def _growth(work: Work, tracking: Tracking, own: Timeline) -> Growth:
    """Return the memory growth from the measured step to a step with twice the samples."""
    if not work.is_cut:
        return Growth((work.samples, work.samples), (own, own))
    larger = tracking.resized(_FIRST, _MEASURED) or tracking.step(_LARGER).timeline
    return Growth((work.samples, 2 * work.samples), (own, larger))


def _before_last(collectives: Sequence[tuple[Collective, ...]], strategy: Strategy) -> tuple[Collective, ...]:
    """Return the collectives of a micro-batch other than the last one of a step.

    If the step has only one micro-batch, return those that an earlier micro-batch would run.
    """
    if len(collectives) == 1 and isinstance(strategy, DDPStrategy) and not shards_gradients(strategy):
        return ()
    return collectives[0]


def without_step(work: Work) -> Work:
    """Return a copy of ``work`` whose training step only sums the parameters, which is enough to size their states."""

    def model() -> LightningModule:
        made = work.model()
        patches.replace(made, "training_step", lambda *_: sum(p.sum() for p in made.parameters() if p.requires_grad))
        return made

    return replace(work, model=model)


def _prepared(
    work: Work, strategy: Strategy, world: World, tracking: Tracking, fake: FakeTensorMode
) -> tuple[LightningModule, Trainer]:
    """Return the module with fake tensors and a Trainer that writes no files."""
    with torch.device("meta"):
        model = work.model()
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        plugins=[FakeCluster(world), *work.options.get("plugins", ())],
        num_nodes=world.nodes,
        devices=world.devices_per_node,
        callbacks=[tracking, _StopAfterSteps(work, tracking)],
        max_epochs=1,
        accumulate_grad_batches=work.accumulation,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **_options(work, model),
    )
    model.trainer = trainer
    with torch.device("meta"):
        model.configure_model()
    trainer.precision_plugin.convert_module(model)
    fake_tensors(model, fake)
    patches.replace(model, "configure_model", lambda: None)  # already called above
    patches.replace(model, "log", lambda *_, **__: None)  # fake tensors have no values to log
    strategy.precision_plugin = with_mixin(Converted, strategy.precision_plugin)
    replace_loops(trainer, explains=False)  # as a run does
    if isinstance(strategy, DeepSpeedStrategy):
        patches.replace(model, "to", lambda *_, **__: model)  # DeepSpeed's engine would move the model
    return model, trainer


def _options(work: Work, model: LightningModule) -> dict[str, Any]:
    """Return additional Trainer arguments.

    As in a real run, gradient clipping is off if the module overrides `configure_gradient_clipping` or uses manual
    optimization.
    """
    options = {name: value for name, value in work.options.items() if name != "plugins"}
    by_itself = not model.automatic_optimization or is_overridden("configure_gradient_clipping", model)
    return options | {"gradient_clip_val": None} if by_itself else options


class _StopAfterSteps(Callback):
    """Callback that steps as a run does, and stops the run after enough steps.

    It stops before the end of the epoch, because a scheduler may need a metric there.
    """

    def __init__(self, work: Work, tracking: Tracking) -> None:
        self._work = work
        self._tracking = tracking

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        use_fused_steps(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        steps, more = divmod(batch_idx + 1, self._work.accumulation)
        if not more:
            _empty_lists(pl_module)
        if not more and steps > _MEASURED and (steps > _LARGER or self._is_enough()):
            trainer.should_stop = True

    def _is_enough(self) -> bool:
        return not self._work.is_cut or self._tracking.resized(_FIRST, _MEASURED) is not None


def _empty_lists(model: nn.Module) -> None:
    """Empty metric states that are lists, so that every step uses the same memory."""
    for part in model.modules():
        if isinstance(part, Metric):
            for name, default in part._defaults.items():
                if isinstance(default, list):
                    getattr(part, name).clear()


class _Batches:
    """Data loader that yields the simulated micro-batches as new fake tensors."""

    def __init__(self, work: Work, sizes: Iterable[int], fake: FakeTensorMode, tracking: Tracking) -> None:
        self._sizes = [size for size in sizes for _ in range(work.accumulation)]
        self._sizes.append(self._sizes[-1])  # one extra, so that the epoch does not end; never trained
        self._fake = fake
        self._tracking = tracking
        self._batches = {size: work.batch(size) for size in set(self._sizes)}

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[Any]:
        for size in self._sizes:
            batch = tree_map_only(Tensor, self._copy, self._batches[size])
            self._tracking.name_batch(batch)
            yield batch
            del batch

    def _copy(self, tensor: Tensor) -> Tensor:
        with self._fake:
            copy = self._fake.from_tensor(tensor).clone()
        self._tracking.ledger.values.know(copy, tensor)
        return copy


@contextmanager
def _processes(strategy: Strategy, world: World) -> Iterator[None]:
    alone = isinstance(strategy, SingleDeviceStrategy)
    own_rank: Any = rank_zero_only.rank  # type: ignore[attr-defined]  # Lightning's, set past its declaration
    try:
        with nullcontext() if alone else fake_group(world):
            yield
    finally:
        patches.replace(rank_zero_only, "rank", own_rank)  # strategies set it to the simulated rank


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence libraries and strategies in this context: their messages are meant for real runs."""
    levels = {name: logging.getLogger(name).level for name in _QUIET}
    for name in levels:
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


def _optimizer_bytes(trainer: Trainer, trained: int) -> int:
    """Return the bytes of the full optimizer state, of which this rank may hold only a shard.

    Args:
        trained: number of trained parameters, of which DeepSpeed's optimizer holds a flat part.
    """
    states = [value for o in trainer.optimizers for state in o.state.values() for value in state.values()]
    bytes: int = sum(_whole(value).nbytes for value in states if isinstance(value, Tensor) and value.ndim)
    if not isinstance(trainer.strategy, DeepSpeedStrategy):
        return bytes
    of_groups = [p for o in trainer.optimizers for group in o.param_groups for p in group["params"]]
    of_groups = of_groups or [p for o in trainer.optimizers for p in o.state]  # ZeRO 3 leaves the groups empty
    held: int = sum(parameter.numel() for parameter in of_groups)
    return round(bytes * trained / max(1, held))


def _whole(tensor: Tensor) -> Tensor:
    """Return a meta tensor with the global shape of a DTensor; return other tensors unchanged."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") if isinstance(tensor, DTensor) else tensor
