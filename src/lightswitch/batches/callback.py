"""Callback that applies batch size, sample order, seeds and position to any LightningModule and DataModule."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from torch import Tensor
from torch.optim import Optimizer

from lightswitch import patches
from lightswitch.batches.accumulation import Items, check_optimizers, weight_and_samples
from lightswitch.batches.loaders import SharedLoaders, data_rank, samples_in
from lightswitch.batches.logs import LogsOfRanks, MetricStates, gather_lists_whole
from lightswitch.batches.plan import (
    STREAMS,
    BatchPlan,
    Position,
    end_epoch,
    rewrite_loops,
    save_position,
    saved_position,
    set_logged_steps,
)
from lightswitch.batches.seeds import mix, seed_generators
from lightswitch.collectives import mean_of_ranks
from lightswitch.errors import Refused, listed
from lightswitch.hooked_strategy import HookedStrategy, Mixin, with_mixin
from lightswitch.monitoring.metrics import Results, is_counted

log = logging.getLogger(__name__)
_TRANSFER = 1  # seed component for the hooks that move a batch to its device, which run before the others
_END = 1  # seed component for the hooks at the end of an epoch or evaluation
_LOADERS = 2  # seed component for the methods that make loaders
_METRICS = "metrics"  # checkpoint key: values of the Trainer's callback metrics
_EVALUATION = -1  # seed component in place of an epoch


class GlobalBatch(Callback):
    """Callback that makes a run the same at any world size: batches, sample order, random numbers, position, metrics.

    It replaces loaders in `Strategy.process_dataloader`, so that it works with every strategy. Give the Trainer
    ``strategy=hooked(strategy)``, ``use_distributed_sampler=False`` and the loops of `replace_loops`. The callback logs
    `train/loss`, the mean over the global batch of the loss that `training_step` returns, and sends `samples`, the
    number of consumed samples, to the loggers.

    Args:
        plan: number of samples of a step, and how they are split.
        seed: seed of the sample order and of all random numbers.
        shares_streams: treat an IterableDataset as one stream for all ranks; otherwise it splits itself, and its
            loaders run unchanged.
    """

    def __init__(self, plan: BatchPlan, seed: int, shares_streams: bool = True) -> None:
        self.plan = plan
        self.seed = seed
        self._resumed = Position(seed=seed, global_batch=plan.global_batch, splits_by_seed=True)
        self._loaders = SharedLoaders(plan, seed, shares_streams)
        self._counter = PositionCounter(plan, self._loaders, self._resumed)
        self._loss: Tensor | None = None  # sum of a step's losses so far, each by the weight of its micro-batch
        self._items = Items()
        self._share_of_samples = 1.0  # weight of this micro-batch by its samples
        self._metrics = MetricStates()
        self._last_values: dict[str, float] = {}  # of the Trainer's callback metrics in the checkpoint
        self._drawn = torch.random.get_rng_state()  # random state after model, data, callbacks and loggers are created

    # Changes to the strategy, in every process

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy = HookedStrategy.of(trainer)
        _check_replicas(trainer, self.plan)
        self._rank, self._device = data_rank(trainer), strategy.root_device
        strategy.share = partial(self._loaders.share, trainer)
        strategy.on_loaders = partial(self._seed_loaders, trainer)
        strategy.on_batch = partial(self._seed, _TRANSFER)
        strategy.on_output = partial(self._items.note, trainer)
        strategy.loss_weight = self._weight
        # configure_model draws the same weights as a constructor: from the same random state, in 32 bits, on the CPU
        torch.random.set_rng_state(self._drawn)
        strategy.precision_plugin = with_mixin(_DrawsIn32Bits, strategy.precision_plugin)
        strategy.on_start = partial(self._metrics.restore, pl_module)
        gather_lists_whole()
        self._logs = LogsOfRanks.of(trainer)
        self._logs.combine(self.plan.replicas / trainer.world_size)

    # Training

    def check_start(self, trainer: Trainer) -> None:
        """Check that the loaders and optimizers fit the batches, and the data those that a resumed run was trained on.

        Raises:
            Refused: they don't.
        """
        at, loaders = self._resumed, self._loaders.training
        loaders.check()
        _check_fractions(trainer, self.plan)
        if loaders.slices and (lost := at.other_dataset(loaders.samples)) is not None:
            raise Refused(
                f"{trainer.ckpt_path} can't be resumed: {lost}; to start from its weights alone, "
                f"type init_from={trainer.ckpt_path} and another run_id"
            )
        check_optimizers(trainer.optimizers, self.plan)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.check_start(trainer)
        for config in trainer.lr_scheduler_configs:
            # Lightning counts micro-batches, and steps no schedule within an optimizer step, which may have fewer
            if config.interval == "step" and config.frequency > 1:
                config.frequency *= trainer.accumulate_grad_batches
        self._counter.start_at(self._resumed)
        values = {name: torch.tensor(value, dtype=torch.float64) for name, value in self._last_values.items()}
        trainer._logger_connector._callback_metrics.update(values)
        if self._resumed.step and trainer.is_global_zero:
            log.info(
                "means      that self.log takes over epoch %d cover the rest of it, in which this run goes on",
                self._resumed.epoch,
            )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._counter.start_epoch(trainer)
        if trainer.current_epoch > 0 and not trainer.fit_loop.is_resuming:  # new iterators are made
            self._loaders.note_replaced(trainer)
        self._loaders.start_epoch(trainer.current_epoch)
        self._seed_alike(trainer.current_epoch)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._loaders.compare_ranks(trainer)
        self._share_of_samples, samples = weight_and_samples(
            self._loaders.training, self.plan, self._counter.micro_batches
        )
        # what the batch logs weighs its samples: Lightning guesses them by the first tensor that it finds in it
        results = trainer.fit_loop.epoch_loop._results
        if samples is not None and isinstance(results, Results):
            results.count(samples)
        self._seed()

    def _seed(self, *of: int) -> None:
        """Seed the generators by the position in the run, and by the purpose of the random numbers."""
        at = self._counter
        seed_generators(mix(self.seed, at.epoch_start.global_step, at.micro_batches, self._rank, *of), self._device)

    def _seed_alike(self, *of: int) -> None:
        """Seed the generators for the hooks around an epoch or evaluation, and for new loaders, alike on all ranks.

        They would draw from the state that the last batch before has left, which a resumed run does not have.
        """
        seed_generators(mix(self.seed, *of), self._device)

    def _seed_loaders(self, trainer: Trainer, for_training: bool) -> None:
        """Seed the generators for new loaders, for training by the epoch if they are made anew in some epochs."""
        if for_training:
            self._loaders.start_set(trainer)
        is_of_epoch = for_training and trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]  # set past its declaration
        epoch = trainer.current_epoch if is_of_epoch else 0
        self._seed_alike(epoch if for_training else _EVALUATION, _LOADERS)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if not loss.requires_grad:
            raise Refused(
                f"the loss of step {trainer.global_step} depends on no trainable parameter: all are frozen, or the "
                "loss is detached; return a loss with a gradient from training_step"
            )
        self._items.count(trainer, self._share_of_samples > 0)
        weight = self._weight()
        if isinstance(weight, Tensor) or weight != 1.0:
            loss.register_hook(lambda gradient: gradient * weight)  # type: ignore[no-untyped-call]  # torch has no types for it

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._items.divide(trainer, optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        logged = is_counted(trainer)
        if logged:
            weight = self._weight()
            loss = outputs.get("loss") if isinstance(outputs, dict) else None
            if isinstance(loss, Tensor):  # Lightning has divided it by the accumulation
                share = loss.detach() * weight
                self._loss = share if self._loss is None else self._loss + share
            self._logs.weight = float(weight)
        self._counter.micro_batches += 1
        if logged and self._counter.is_at_step_end(trainer):
            self._log_step(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seed_alike(self._counter.epoch_start.epoch, _END)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._log_samples(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        end_epoch(trainer.fit_loop.epoch_progress)
        self._log_samples(trainer)

    def _weight(self) -> float | Tensor:
        """Return the weight of this micro-batch's mean in the mean over its step."""
        return self._share_of_samples if (of_items := self._items.weight) is None else of_items

    def _log_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loss, self._loss = self._loss, None
        if loss is not None:
            # Logged here, after the module's own hooks, this value replaces a `train/loss` of one micro-batch.
            of_items = 1.0 if self._items.factor is None else self._items.factor
            pl_module.log("train/loss", mean_of_ranks(loss * of_items), prog_bar=True, batch_size=1)
        self._log_samples(trainer)

    def _log_samples(self, trainer: Trainer) -> None:
        if not self._loaders.training.slices or trainer.global_rank != 0:
            return
        position = self._counter.position(trainer)
        for logger in trainer.loggers:  # not through `log`, whose 32-bit floats can't count beyond 16 million
            logger.log_metrics({"samples": position.samples}, step=max(0, _logged_steps(trainer, position) - 1))

    def first_logged_step(self, trainer: Trainer) -> int:
        """Return the step, as loggers count them, at which training begins in this start of the run."""
        return _logged_steps(trainer, self._resumed)

    # Evaluation

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seed_loaders(trainer, for_training=False)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            self._metrics.restore(pl_module, trains=False)
        self._seed_alike(_EVALUATION)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seed_alike(_EVALUATION, _END)

    on_test_start = on_predict_start = on_validation_start
    on_test_epoch_end = on_validation_epoch_end

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Seed the generators by the batch, so that the same weights give the same results, also after a resume."""
        if not trainer.predicting:
            loaders: Any = trainer._evaluation_loop._combined_loader
            samples = samples_in(loaders.flattened[dataloader_idx], batch_idx)
            if samples is not None:
                patches.replace(trainer._results, "batch_size", samples)
        seed_generators(mix(self.seed, dataloader_idx, batch_idx, self._rank), self._device)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    # Position

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != TrainerFn.FITTING:  # weights of any step, without optimizers
            return
        if trainer.state.status == TrainerStatus.INTERRUPTED:  # an error, in the middle of a step: no run resumes there
            return
        self._metrics.save(pl_module, checkpoint)
        checkpoint[_METRICS] = {name: value.item() for name, value in trainer.callback_metrics.items()}
        save_position(checkpoint, position := self._counter.position(trainer))
        checkpoint[STREAMS] = self._loaders.states_at(position.step)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        position = saved_position(checkpoint)
        self._metrics.load(checkpoint)
        if trainer.state.fn != TrainerFn.FITTING:
            if position is not None:  # metrics are logged at the step of the weights that are evaluated
                set_logged_steps(trainer.fit_loop.epoch_loop, _logged_steps(trainer, position))
            return
        assert position is not None, "a run resumes only from a checkpoint with a position"
        self._resumed = position
        self._last_values = checkpoint.get(_METRICS, {})
        trainer.num_sanity_val_steps = 0  # its batches would count in metrics such as the best value so far
        are_new = position.step == 0 and trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]  # set past its type
        self._loaders.start_at(position, [] if are_new else checkpoint.get(STREAMS, []))
        if (fetcher := trainer.fit_loop._data_fetcher) is not None:  # the module has requested the number of steps
            iter(fetcher)  # drop the prefetched batch, which is the first epoch's
        stepped = _logged_steps(trainer, position)
        rewrite_loops(checkpoint["loops"]["fit_loop"], position, self.plan.accumulation, stepped)

    def describe_position(self, trainer: Trainer, most_samples: int | None = None) -> str:
        """Return a description of this rank's batch: stage, epoch, step, micro-batch, and the indices of its samples.

        Args:
            most_samples: maximum number of listed samples; None for all.
        """
        stage = trainer.state.stage or trainer.state.fn
        message = f"in {stage.value if stage else None}, epoch {trainer.current_epoch}, step {trainer.global_step}"
        if trainer.state.stage != RunningStage.TRAINING:
            return message
        step, micro = divmod(self._counter.micro_batches, self.plan.accumulation)
        parts = [slices.samples_of(step, micro) for slices in self._loaders.training.slices if step < slices.steps]
        samples = [str(sample) for part in parts for sample in part]
        shown = len(samples) if most_samples is None else most_samples
        return f"{message}, micro batch {micro}: samples {listed(samples, shown=shown)}" if samples else message


class PositionCounter:
    """Counter of finished micro-batches, which determines the run's position in any hook.

    Args:
        start: position at which the run starts.
    """

    def __init__(self, plan: BatchPlan, loaders: SharedLoaders, start: Position) -> None:
        self._plan = plan
        self._loaders = loaders
        self.epoch_start = start
        self.micro_batches = 0  # finished in this epoch

    def start_at(self, at: Position) -> None:
        """Start counting at a position."""
        self.epoch_start = replace(
            at,
            step=0,
            global_step=at.global_step - at.step,
            samples=at.samples - self._samples(at.step, at.epoch),
        )
        self.micro_batches = at.step * self._plan.accumulation

    def start_epoch(self, trainer: Trainer) -> None:
        """Start counting the micro-batches of the Trainer's epoch."""
        self.epoch_start = replace(self.position(trainer), epoch=trainer.current_epoch, step=0)
        self.micro_batches = 0

    def position(self, trainer: Trainer) -> Position:
        """Return the position after the last optimizer step."""
        start, step = self.epoch_start, self._steps(trainer)
        ended: int = trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]  # set past its type
        has_ended = step > 0 and self.is_at_epoch_end(trainer) and ended > start.epoch
        return replace(
            start,
            epoch=start.epoch + has_ended,
            step=0 if has_ended else step,
            global_step=start.global_step + step,
            samples=start.samples + self._samples(step, start.epoch),
            dataset=self._loaders.training.samples or None,
            optimizer_steps=trainer.global_step,
        )

    def _samples(self, steps: int, epoch: int) -> int:
        """Return the number of samples in an epoch's first steps."""
        training = self._loaders.training
        return training.longest.samples_before(steps, epoch) if training.slices else steps * self._plan.global_batch

    def _steps(self, trainer: Trainer) -> int:
        """Return the number of global batches of this epoch that have updated the weights."""
        steps, left = divmod(self.micro_batches, self._plan.accumulation)
        return steps + (left > 0 and self.is_at_epoch_end(trainer))  # an epoch's last step may have fewer

    def is_at_step_end(self, trainer: Trainer) -> bool:
        """Return whether the finished micro-batches form whole optimizer steps."""
        return self.micro_batches % self._plan.accumulation == 0 or self.is_at_epoch_end(trainer)

    def is_at_epoch_end(self, trainer: Trainer) -> bool:
        """Return whether all micro-batches of the epoch are finished."""
        progress = trainer.fit_loop.epoch_loop.batch_progress
        # the last batch of a stream is known only once it is fetched
        is_last = progress.is_last_batch and self.micro_batches >= progress.current.ready
        return is_last or self.micro_batches >= trainer.num_training_batches


class _DrawsIn32Bits(Mixin, Precision):
    def tensor_init_context(self) -> AbstractContextManager[None]:
        """Draw weights in 32 bits, as a constructor does; Lightning would draw them in the precision of the run."""
        return nullcontext()


def _check_replicas(trainer: Trainer, plan: BatchPlan) -> None:
    """Check that the number of data-parallel ranks is that for which the global batch was split.

    Raises:
        Refused: it is not, so that a step would take another number of samples.
    """
    found = int((trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1))
    if found != plan.replicas:
        raise Refused(
            f"the global batch is split for {plan.replicas} devices, but {type(trainer.strategy).__name__} has {found} "
            "that read different samples; set trainer.devices and trainer.num_nodes to numbers"
        )


def _logged_steps(trainer: Trainer, position: Position) -> int:
    """Return the step number for loggers: optimizer steps, or batches under manual optimization."""
    return position.steps if trainer.lightning_module.automatic_optimization else position.global_step


def _check_fractions(trainer: Trainer, plan: BatchPlan) -> None:
    """Check that fractions of an epoch have whole steps: Lightning counts micro-batches.

    Raises:
        Refused: one ends within a step.
    """
    limit = "overfit_batches" if trainer.overfit_batches else "limit_train_batches"  # type: ignore[attr-defined]  # set past Lightning's declaration
    counted: dict[str, Any] = {limit: trainer.num_training_batches, "val_check_interval": trainer.val_check_batch}
    for name, micro_batches in counted.items():
        fraction = getattr(trainer, name)
        if isinstance(fraction, float) and fraction < 1.0 and micro_batches % plan.accumulation:
            raise Refused(
                f"trainer.{name}={fraction} of an epoch is {micro_batches} micro batches, and {plan.accumulation} are "
                f"a step; type a number of steps, as trainer.{name}={max(1, int(micro_batches) // plan.accumulation)}"
            )
