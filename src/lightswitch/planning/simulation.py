"""One rank's steps through Lightning's loop and the strategy's own code, on tensors without data."""

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
from lightswitch.strategies.kernels import FusedStep
from lightswitch.strategies.trained import Unused

_NEEDS_VALUES = (UnsupportedFakeTensorException, UnsupportedOperatorException)
_IN_C = "data is not allocated"  # of torch, where C++ reads a fake tensor
_FIRST, _MEASURED, _LARGER = range(3)  # numbers of the steps
_QUIET = ("lightning.pytorch", "lightning.fabric", "lightswitch", "torch.distributed")  # whose lines are of a run


@dataclass(frozen=True)
class Work:
    """Model and batches of a run, apart from its strategy.

    Attributes:
        model: builds the module.
        batch: returns a micro batch of so many samples.
        is_cut: whether ``batch`` returns any number of samples; else its batches have one size.
        samples: of a micro batch.
        accumulation: micro batches a step.
        options: further arguments of the Trainer.
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
    """Simulate steps of one rank of a world under a strategy, and return what the second of them does.

    The first step makes the optimizer's state. It has twice the samples, so that its forward and backward passes,
    compared with the second step's, show how memory grows with samples. Where they can't be compared, a third step of
    twice the samples shows it. A batch that can't be cut has one size in all steps.

    Args:
        look: called after the steps, while the rank and its process groups are there.

    Raises:
        NeedsValues: the module asks for values, and a plan's guesses of them do not lead through a step.
        Refused: the strategy, or the module, fails.
        Unplanned: this torch can't stand in for other ranks.
    """
    if world.size > 1 and not has_collectives():
        raise Unplanned(
            [f"torch {torch.__version__} has no collectives for tensors without values; take a newer torch"]
        )
    strategy = alone(strategy)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    answers = [Answers()] if isinstance(strategy, DeepSpeedStrategy) else []
    tracking = Tracking(fake, answers)
    with _quiet(), _processes(strategy, world), fake_zero(strategy, world):
        model, trainer = _prepared(work, strategy, world, tracking, fake)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
        try:
            trainer.fit(model, _Batches(work, _sizes(work), fake, tracking))
        except _NEEDS_VALUES as error:
            raise NeedsValues(f"needs values ({error.args[0]})") from error
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
        optimizer_bytes=_optimizer_bytes(trainer, parameters),
        guessed=dict(tracking.ledger.values.guessed),
    )


def _needing(values: Values, error: Exception) -> Exception:
    """Return an error as it is told: that of a step which has been given guesses may follow from them."""
    if _IN_C in str(error):
        return NeedsValues("has C++ code read values")
    if values.guessed:
        return NeedsValues(
            f"asks for values at {next(iter(values.guessed))}, and with guesses of them fails: {one_line(error)}"
        )
    return error


def _sizes(work: Work) -> tuple[int, ...]:
    """Return the micro batch of each step; the third step is made only where the first can't be compared."""
    larger = 2 * work.samples if work.is_cut else work.samples
    return (larger, work.samples, larger)


def _growth(work: Work, tracking: Tracking, own: Timeline) -> Growth:
    """Return how memory grows from the measured step to one of twice the samples."""
    if not work.is_cut:
        return Growth((work.samples, work.samples), (own, own))
    larger = tracking.resized(_FIRST, _MEASURED) or tracking.step(_LARGER).timeline
    return Growth((work.samples, 2 * work.samples), (own, larger))


def _before_last(collectives: Sequence[tuple[Collective, ...]], strategy: Strategy) -> tuple[Collective, ...]:
    """Return the collectives of a micro batch before a step's last; where a step has only one, those it would have."""
    if len(collectives) == 1 and isinstance(strategy, DDPStrategy) and not shards_gradients(strategy):
        return ()
    return collectives[0]


def without_step(work: Work) -> Work:
    """Return the same work with a training step that only sums the parameters: enough to know their states."""

    def model() -> LightningModule:
        made = work.model()
        patches.replace(made, "training_step", lambda *_: sum(p.sum() for p in made.parameters() if p.requires_grad))
        return made

    return replace(work, model=model)


def _prepared(
    work: Work, strategy: Strategy, world: World, tracking: Tracking, fake: FakeTensorMode
) -> tuple[LightningModule, Trainer]:
    """Return the module on fake tensors, and a Trainer that writes nothing."""
    with torch.device("meta"):
        model = work.model()
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        plugins=[FakeCluster(world), *work.options.get("plugins", ())],
        num_nodes=world.nodes,
        devices=world.devices_per_node,
        callbacks=[tracking, FusedStep(), _Alone(work, tracking)],
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
    patches.replace(model, "configure_model", lambda: None)  # it is done
    patches.replace(model, "log", lambda *_, **__: None)  # there is nothing to log
    strategy.precision_plugin = with_mixin(Converted, strategy.precision_plugin)
    patches.replace(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda: None)  # as in a run
    if isinstance(strategy, DeepSpeedStrategy):
        patches.replace(model, "to", lambda *_, **__: model)  # DeepSpeed's engine moves it
    return model, trainer


def _options(work: Work, model: LightningModule) -> dict[str, Any]:
    """Return further arguments of the Trainer; a module that clips itself or optimizes by hand is not clipped, as in a
    run."""
    options = {name: value for name, value in work.options.items() if name != "plugins"}
    by_itself = not model.automatic_optimization or is_overridden("configure_gradient_clipping", model)
    return options | {"gradient_clip_val": None} if by_itself else options


class _Alone(Callback):
    """Callback that ends the run once enough steps are made, and has a strategy wait for no other rank's parameters.

    It ends the run before the end of the epoch, where a schedule may need a metric.
    """

    def __init__(self, work: Work, tracking: Tracking) -> None:
        self._work = work
        self._tracking = tracking

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

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        unused = getattr(trainer.strategy, "_unused", None)
        if isinstance(unused, Unused):
            unused.world_size = 1


def _empty_lists(model: nn.Module) -> None:
    """Empty the states of metrics that are lists, so that each step is like the one before."""
    for part in model.modules():
        if isinstance(part, Metric):
            for name, default in part._defaults.items():
                if isinstance(default, list):
                    getattr(part, name).clear()


class _Batches:
    """Data loader of the simulated micro batches, each of new tensors."""

    def __init__(self, work: Work, sizes: Iterable[int], fake: FakeTensorMode, tracking: Tracking) -> None:
        self._sizes = [size for size in sizes for _ in range(work.accumulation)]
        self._sizes.append(self._sizes[-1])  # which is not reached
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
        patches.replace(rank_zero_only, "rank", own_rank)  # strategies set it to the rank that is simulated


@contextmanager
def _quiet() -> Iterator[None]:
    """Context that silences libraries and strategies: their messages are meant for real runs."""
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


def _optimizer_bytes(trainer: Trainer, parameters: int) -> int:
    """Return the bytes of the optimizer's whole state, of which this rank holds a part."""
    of_groups = [p for o in trainer.optimizers for group in o.param_groups for p in group["params"]]
    of_groups = of_groups or [p for o in trainer.optimizers for p in o.state]  # ZeRO 3 has them in no group
    held = sum(_whole(parameter).numel() for parameter in of_groups)
    states = [value for o in trainer.optimizers for state in o.state.values() for value in state.values()]
    bytes = sum(_whole(value).nbytes for value in states if isinstance(value, Tensor) and value.ndim)
    return round(bytes * parameters / max(1, held))


def _whole(tensor: Tensor) -> Tensor:
    """Return the whole of a DTensor, without memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") if isinstance(tensor, DTensor) else tensor
