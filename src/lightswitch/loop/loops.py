"""Lightning's loops, which do less work in each batch, and end a resumed run like any other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.loops.optimization.manual import _ManualOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightswitch import patches
from lightswitch.errors import Refused
from lightswitch.hooked_strategy import HookedStrategy
from lightswitch.loop.hooks import refusal
from lightswitch.monitoring.metrics import Results, is_logged

_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def replace_loops(trainer: Trainer) -> None:
    """Replace a Trainer's loops over epochs and batches; hooks, their order and their arguments stay the same."""
    patches.replace(trainer, "fit_loop", RunLoop(trainer))


class RunLoop(_FitLoop):
    """Loop over epochs that also ends a run that is resumed with no step left to train.

    Lightning returns at once there, without the hooks of the end of training, which may not have run.
    """

    def __init__(self, trainer: Trainer) -> None:
        given = trainer.fit_loop
        super().__init__(trainer, given.min_epochs, given.max_epochs)
        self.epoch_loop = EpochLoop(trainer, given.epoch_loop.min_steps, given.epoch_loop.max_steps)

    def setup_data(self) -> None:
        """Set up the training loader, unless there is one already.

        Raises:
            Refused: it has no batches; Lightning would end such a run as if it had trained.
        """
        on_loaders = getattr(self.trainer.strategy, "on_loaders", None)  # of HookedStrategy
        if on_loaders is not None and (self._combined_loader is None or self._should_reload_train_dl):
            on_loaders(True)
        super().setup_data()
        if on_loaders is not None and self.trainer.val_dataloaders is None:
            on_loaders(False)  # of a run without a sanity check, such as a resumed one; Lightning requests them next
        if self.max_batches == 0 and self.trainer.limit_train_batches != 0:
            raise Refused("data: train_dataloader has no batches; trainer.limit_train_batches=0 leaves training out")

    @property
    def skip(self) -> bool:
        has_batches = self.max_batches != 0 and self.trainer.limit_train_batches != 0
        return super().skip and not (self.is_resuming and has_batches)


class EpochLoop(_TrainingEpochLoop):
    """Loop over the batches of an epoch that does the same as Lightning's, in the same order, with fewer calls.

    Training steps that take the dataloader's iterator use Lightning's implementation.
    """

    def __init__(self, trainer: Trainer, min_steps: int | None, max_steps: int) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self._results: Results = Results(training=True)
        self.automatic_optimization.output_result_cls = Output
        self.manual_optimization = OptimizationByHand(trainer)
        self._step: Callable[..., Any] | None = None
        self._takes_index = False
        self.begun = 0  # batches that this process has trained on
        self._moves_by_hooks = True

    @property
    def global_step(self) -> int:
        """Optimizer steps, of which automatic or manual optimization has taken all."""
        steps: int = self.automatic_optimization.optim_progress.optimizer.step.total.completed
        return steps or self.manual_optimization.optim_step_progress.total.completed

    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        """Prepare for an epoch; a resumed run goes on before a step, so it has nothing to repeat or to leave out."""
        super().on_run_start(data_fetcher)
        self._results.start_epoch()
        _Loop.restarting.fset(self.trainer.fit_loop, False)  # type: ignore[attr-defined]  # past FitLoop's own setter, which keeps it set by max_steps
        trainer = self.trainer
        self._device = trainer.strategy.root_device  # which a strategy looks up in the environment
        owners = (trainer.lightning_module, getattr(trainer, "datamodule", None))
        own = any(is_overridden(name, owner) for name in _TRANSFERS for owner in owners)
        self._moves_by_hooks = own or type(trainer.strategy).batch_to_device is not Strategy.batch_to_device

    def advance(self, data_fetcher: _DataFetcher) -> None:
        """Train on a batch.

        Raises:
            StopIteration: no batch is left, or a hook ends the epoch.
        """
        if type(data_fetcher) is _DataLoaderIterDataFetcher:  # isinstance asks its abstract base class
            super().advance(data_fetcher)
            return
        trainer, progress, results = self.trainer, self.batch_progress, self._results
        connector = trainer._logger_connector
        batch, _, _ = next(data_fetcher)
        batch_idx = self.batch_idx + 1
        if progress.is_last_batch != data_fetcher.done:
            progress.increment_by(0, is_last_batch=data_fetcher.done)
        batch = self._moved(batch)
        progress.increment_ready()
        if connector._first_loop_iter is not False:  # for Lightning, the first two batches of an epoch differ
            connector.on_batch_start(batch)
        results.start_batch(batch)
        try:
            output, ends_epoch = self._trained(batch, batch_idx)
        except Exception as error:
            if (line := refusal(error, trainer, self.begun)) is not None:
                raise line from error
            raise
        progress.increment_processed()
        self.update_lr_schedulers("step", update_plateau_schedulers=False)
        if self._num_ready_batches_reached():
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if ends_epoch:
            raise StopIteration
        call._call_callback_hooks(trainer, "on_train_batch_end", output, batch, batch_idx)
        call._call_lightning_module_hook(trainer, "on_train_batch_end", output, batch, batch_idx)
        self.begun += 1
        if results.of_step is None:
            connector.on_batch_end()  # which passes values to callbacks and the progress bar
        progress.increment_completed()
        if is_logged(trainer) or trainer.fast_dev_run:
            connector.update_train_step_metrics()
        results.start_batch(None)

    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        """Validate if it is due, and count the step."""
        if self._is_near_validation:
            super().on_advance_end(data_fetcher)
            return
        self.update_lr_schedulers("step", update_plateau_schedulers=True)
        if not self._should_accumulate():
            self._batches_that_stepped += 1

    def _should_accumulate(self) -> bool:
        return self.trainer.accumulate_grad_batches > 1 and super()._should_accumulate()

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Step the schedulers that are due."""
        if self.trainer._accelerator_connector.strategy.lr_scheduler_configs:  # past a property, in each batch
            super().update_lr_schedulers(interval, update_plateau_schedulers)

    def _moved(self, batch: Any) -> Any:
        """Return a batch on the device, in the run's precision."""
        trainer = self.trainer
        batch = trainer.precision_plugin.convert_input(batch)
        if not self._moves_by_hooks:
            return batch if self._device.type == "cpu" else move_data_to_device(batch, self._device)
        strategy = trainer.strategy
        if isinstance(strategy, HookedStrategy) and strategy.on_batch is not None:
            strategy.on_batch()
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)

    def _trained(self, batch: Any, batch_idx: int) -> tuple[Any, bool]:
        """Return the output of the training step, and whether a hook ends the epoch instead of the step."""
        trainer, progress = self.trainer, self.batch_progress
        if batch is None:
            self._warning_cache.warn("train_dataloader yielded None. If this was on purpose, ignore this warning...")
            return None, False
        call._call_callback_hooks(trainer, "on_train_batch_start", batch, batch_idx)
        response = call._call_lightning_module_hook(trainer, "on_train_batch_start", batch, batch_idx)
        call._call_strategy_hook(trainer, "on_train_batch_start", batch, batch_idx)
        if response == -1:
            progress.increment_by(0, is_last_batch=True)
            return None, True
        progress.increment_started()
        if isinstance(trainer.profiler, PassThroughProfiler):
            return self._optimized(batch, batch_idx), False
        with trainer.profiler.profile("run_training_batch"):
            return self._optimized(batch, batch_idx), False

    def _optimized(self, batch: Any, batch_idx: int) -> Any:
        """Return the output of the training step on a batch, by which optimizers have stepped if they are due."""
        trainer, arguments = self.trainer, self._arguments(batch, batch_idx)
        if trainer.lightning_module.automatic_optimization:
            return self.automatic_optimization.run(trainer.optimizers[0], batch_idx, arguments)
        return self.manual_optimization.run(arguments)

    def _arguments(self, batch: Any, batch_idx: int) -> OrderedDict[str, Any]:
        """Return the arguments of `training_step`, whose signature is inspected once."""
        step = self.trainer.lightning_module.training_step
        if step != self._step:
            self._step, self._takes_index = step, is_param_in_hook_signature(step, "batch_idx", min_args=2)
        return OrderedDict(batch=batch, batch_idx=batch_idx) if self._takes_index else OrderedDict(batch=batch)

    @property
    def _is_near_validation(self) -> bool:
        """Whether a validation may be due after this batch; if so, Lightning's loop decides, with more calls."""
        trainer = self.trainer
        every_n_batches = trainer.val_check_batch
        if trainer.should_stop or self._skip_next_val or not isinstance(every_n_batches, int) or every_n_batches < 1:
            return True
        if getattr(trainer, "_val_check_time_interval", None) is not None:
            return True
        counted = self.total_batch_idx if trainer.check_val_every_n_epoch is None else self.batch_idx
        return (counted + 1) % every_n_batches == 0


class Output(ClosureResult):
    """Output of a training step whose loss is divided by the accumulation only where batches are accumulated.

    Lightning also divides by one, which costs an operator in the forward and one in the backward pass.
    """

    @classmethod
    def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> ClosureResult:
        if normalize == 1 and isinstance(training_step_output, Tensor):
            return cls(training_step_output)
        return super().from_training_step_output(training_step_output, normalize)


class OptimizationByHand(_ManualOptimization):
    """Manual optimization that also counts a step that bypasses Lightning's wrapper of the optimizer, once a batch.

    SAM's `second_step` steps an inner optimizer, and many modules call `self.optimizers().optimizer.step()`. Limits and
    checkpoints depend on the count.
    """

    def run(self, kwargs: OrderedDict[str, Any]) -> dict[str, Any]:
        progress, stepped = self.optim_step_progress, []
        counted = progress.total.completed
        hook = register_optimizer_step_post_hook(lambda optimizer, *_: stepped.append(optimizer))
        try:
            output = super().run(kwargs)
        finally:
            hook.remove()
        if stepped and progress.total.completed == counted:
            progress.increment_ready()
            progress.increment_completed()
        return output
