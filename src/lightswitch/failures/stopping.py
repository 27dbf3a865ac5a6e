"""The callback by which a run survives: it saves between steps, and ends on a signal or a loss that is not finite."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Mapping
from time import perf_counter
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightswitch import patches
from lightswitch.batches.callback import GlobalBatch
from lightswitch.checkpoints.last import LastCheckpoints, StepBoundary
from lightswitch.checkpoints.portable import PortableCheckpoints
from lightswitch.errors import LostRank, Refused, Stopped
from lightswitch.failures.watchdog import Watchdog
from lightswitch.process import REQUEUED, Signals

log = logging.getLogger(__name__)
# if ranks received different signals, the last of these counts: notice of a time limit requests a requeue
_RANKING = (None, signal.SIGHUP, signal.SIGINT, signal.SIGTERM, *REQUEUED)
_ROUND_SECONDS = 0.25
_MOST_STEPS = 16  # in a round: later steps may take longer


class Survival(StepBoundary):
    """Callback that, between steps, saves what is due, and ends training with `Stopped` once a rank has got a signal.

    All ranks agree on the step and the signal, since they save a checkpoint together: after the step in which the
    signal arrived, or the next one, or within half a second if steps are shorter.

    A signal also ends a validation. That is no moment to save: the next start goes on from the last checkpoint.

    Args:
        watchdog: is told of each batch that begins, and of an error before the teardown.
        losses: checks losses and weights; None if losses may have any value.
        init_from, init_names, ends_again: see `StepBoundary`.
    """

    def __init__(
        self,
        signals: Signals,
        watchdog: Watchdog | None = None,
        losses: LossCheck | None = None,
        init_from: str | None = None,
        init_names: Mapping[str, str] | None = None,
        ends_again: bool = False,
    ) -> None:
        super().__init__(init_from, init_names, ends_again)
        self._signals = signals
        self.watchdog = watchdog
        self._losses = losses
        self._ranks: dist.ProcessGroup | None = None
        self._rounds: Rounds
        self._common_batches = 0  # validation batches left that all ranks have

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._begin_batch(is_step=False)  # preparing the data may take long
        self._signals.catch(trainer.is_global_zero)
        # Lightning saves and broadcasts in signal handlers
        patches.replace(trainer._signal_connector, "register_signal_handlers", lambda: None)
        if self._ranks is None and trainer.world_size > 1:
            timeout = getattr(trainer.strategy, "_timeout", None)
            self._ranks = dist.new_group(backend="gloo", timeout=timeout)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._signals.defer()
        self._rounds = Rounds(self._ranks)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._begin_batch()
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def end_if_asked(self, trainer: Trainer) -> None:
        """Save a checkpoint and end training if the ranks have agreed on a signal.

        Raises:
            Stopped: they have.
        """
        if self._rounds.end_before_step() and (asked := self._rounds.end(self._asked)):
            self._end(trainer, asked, saves=True)

    def _end(self, trainer: Trainer, asked: float, saves: bool) -> NoReturn:
        try:
            if saves and trainer.checkpoint_callbacks:  # else the run is configured without checkpoints
                last = LastCheckpoints(f"{trainer.default_root_dir}/checkpoints", every_n_steps=1)
                (self._last or [last])[0].save(trainer)
            if isinstance(trainer.strategy, PortableCheckpoints):
                trainer.strategy.finish_saving()
        except (OSError, LostRank) as failure:  # the first is also of a link to a checkpoint
            log.error("%s; the run will resume from the previous checkpoint", failure)
        signalled = _RANKING[int(asked)]
        assert signalled is not None
        raise Stopped(signalled)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._losses is not None:
            self._losses.take(trainer, loss)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if not trainer.fit_loop._should_accumulate():
            self._rounds.begin(self._asked)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        if self._losses is not None:
            self._losses.end_batch(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._begin_batch(is_step=False)
        if self._losses is not None:
            self._losses.refuse_bad_weights(trainer)
        super().on_save_checkpoint(trainer, pl_module, checkpoint)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        batches = sum(trainer.num_val_batches)
        fewest = -self._most(-batches)
        self._common_batches = 0 if math.isinf(fewest) else int(fewest)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._begin_batch(is_step=not trainer.sanity_checking)
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking and self._common_batches > 0:
            self._common_batches -= 1
            if asked := self._most(self._asked):
                if trainer.is_global_zero:
                    log.info("stops      in a validation: the next start goes on from the last checkpoint")
                self._end(trainer, asked, saves=False)

    def on_test_batch_start(self, *_: Any) -> None:
        self._begin_batch()

    def on_predict_batch_start(self, *_: Any) -> None:
        self._begin_batch()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._signals.obey()  # everything is saved; what follows can be repeated

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        if self.watchdog is not None:
            self.watchdog.report(exception, trainer)

    def _begin_batch(self, is_step: bool = True) -> None:
        if self.watchdog is not None:
            self.watchdog.begin_batch(is_step)

    @property
    def _asked(self) -> int:
        return _RANKING.index(self._signals.received)

    def _most(self, number: float) -> float:
        """Return the largest number over all ranks. Collective."""
        if self._ranks is None:
            return number
        together = torch.tensor(number, dtype=torch.float64)
        dist.all_reduce(together, dist.ReduceOp.MAX, self._ranks)
        return together.item()


class Rounds:
    """Rounds of training steps, each with one exchange of numbers; every rank ends a round before the same step.

    The exchange starts while the optimizer steps and is read before the next step, so ranks hardly wait for one
    another, though an exchange takes long over many nodes. If steps are short, a round has as many as fit into 0.25 s,
    at most 16, as measured on the slowest rank in the previous round.

    Args:
        ranks: the process group of all ranks; None for a single process.
    """

    def __init__(self, ranks: dist.ProcessGroup | None) -> None:
        self._ranks = ranks
        self._steps = self._steps_left = 1
        self._ended_seconds = -math.inf  # the duration of a step is unknown: the next round is one step
        self._exchange: tuple[torch.Tensor, dist.Work] | None = None

    def end_before_step(self) -> bool:
        """Count a step that is about to start, and return whether the round ends before it."""
        self._steps_left -= 1
        return self._steps_left <= 0

    def begin(self, number: float) -> None:
        """Start exchanging the ranks' numbers, if the round ends before the next step. Collective; does not wait."""
        if self._ranks is None or self._exchange is not None or self._steps_left > 1:
            return
        seconds_a_step = (perf_counter() - self._ended_seconds) / self._steps
        given = torch.tensor([number, seconds_a_step], dtype=torch.float64)
        work = dist.all_reduce(given, dist.ReduceOp.MAX, self._ranks, async_op=True)
        self._exchange = given, work

    def end(self, number: float) -> float:
        """End the round, and return the largest number over the ranks, as given when the exchange began. Collective."""
        self.begin(number)
        if self._exchange is None:
            return number
        (largest, work), self._exchange = self._exchange, None
        work.wait()
        number, seconds_a_step = largest.tolist()
        self._steps = self._steps_left = max(1, min(_MOST_STEPS, int(_ROUND_SECONDS / seconds_a_step)))
        self._ended_seconds = perf_counter()
        return number


_ADVICE = (
    "resume from the last checkpoint with a lower learning rate, or with on_nan=ignore, under which precision=16-mixed "
    "skips such a step"
)


class LossCheck:
    """Check of each loss before its backward pass, and of the weights before they are saved.

    On a GPU, where each check would synchronize, the losses are checked together, at each logged step and before a
    checkpoint is saved. A checkpoint with weights that are not finite is never saved.

    Args:
        batch: describes the run's position in training.

    Raises:
        Refused: in any method, on the rank with the bad loss or weights.
    """

    def __init__(self, batch: GlobalBatch) -> None:
        self._batch = batch
        self._waiting: list[tuple[str, Tensor]] = []  # losses not yet checked, with their positions

    def take(self, trainer: Trainer, loss: Tensor) -> None:
        """Check a loss, or keep it for later."""
        if loss.device.type == "cpu":
            if not math.isfinite(value := loss.item()):
                raise self._error(trainer, value, self._batch.describe_position(trainer, most_samples=8))
        else:
            kept = loss.detach().clone()  # the next step of a CUDA graph overwrites the loss
            self._waiting.append((f"in step {trainer.global_step}", kept))

    def end_batch(self, trainer: Trainer) -> None:
        """Check the losses kept if this step is logged."""
        if self._waiting and trainer._logger_connector.should_update_logs:
            self._check_waiting(trainer)

    def refuse_bad_weights(self, trainer: Trainer) -> None:
        """Check the losses kept and the weights, before a checkpoint is saved."""
        self._check_waiting(trainer)
        if name := _not_finite(trainer.lightning_module):
            where = self._batch.describe_position(trainer, most_samples=8)
            raise Refused(f"{name} is not finite, so no checkpoint is saved, {where}; {_ADVICE}")

    def _check_waiting(self, trainer: Trainer) -> None:
        """Check the stored losses, which synchronizes with the device."""
        waiting, self._waiting = self._waiting, []
        values = torch.stack([loss.float() for _, loss in waiting]).tolist() if waiting else []
        for (where, _), value in zip(waiting, values, strict=True):
            if not math.isfinite(value):
                raise self._error(trainer, value, where)

    def _error(self, trainer: Trainer, value: float, where: str) -> Refused:
        name = _not_finite(trainer.lightning_module)
        weights = f"{name} is not finite either" if name else "the weights are finite"
        return Refused(f"the loss is {value} {where}; {weights}; {_ADVICE}")


@torch.no_grad()
def _not_finite(module: LightningModule) -> str | None:
    """Return the name of the first parameter whose local tensor is not finite; None if all are finite."""
    held = {
        name: parameter.to_local() if isinstance(parameter, DTensor) else parameter
        for name, parameter in module.named_parameters()
        if parameter.is_floating_point() or parameter.is_complex()
    }
    names = [name for name, tensor in held.items() if tensor.numel()]
    if not names:
        return None
    # the largest absolute values: squares overflow, for example of a mask that holds a dtype's lowest value
    largest = torch._foreach_norm([held[name] for name in names], math.inf)
    # some may be on the host: strategies may offload parameters
    finite = torch.stack([one.cpu().to(torch.float64) for one in largest]).isfinite().tolist()
    return next((name for name, is_finite in zip(names, finite, strict=True) if not is_finite), None)
