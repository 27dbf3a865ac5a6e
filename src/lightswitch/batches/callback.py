"""The callback that imposes batch, order, randomness and position on any LightningModule and DataModule."""

from __future__ import annotations

import functools
import logging
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torch.utils.data import DataLoader

from lightswitch import patches
from lightswitch.batches.accumulation import Accumulation
from lightswitch.batches.combined import Combined
from lightswitch.batches.loaders import evaluation_loader, is_stream, obstacle, pin, training_loader
from lightswitch.batches.metrics import exact_mean, synced_in_evaluation
from lightswitch.batches.order import TrainingSlices
from lightswitch.batches.plan import BatchPlan
from lightswitch.batches.position import STREAMS, Position, rewrite_loops, save_position, saved_position
from lightswitch.batches.randomness import mix, seed_generators
from lightswitch.batches.stream_loader import evaluation_stream, training_stream
from lightswitch.errors import Refused, listed
from lightswitch.monitoring.progress import Progress
from lightswitch.monitoring.throughput import Throughput

log = logging.getLogger(__name__)


class GlobalBatch(Callback):
    """Callback that makes a run the same at any world size: batches, sample order, random numbers, position, metrics.

    It takes hold of the public `Strategy.process_dataloader`, so that it works with every strategy; give the Trainer
    ``use_distributed_sampler=False`` beside it. It logs `train/loss`, the mean over the global batch of the loss that
    `training_step` returns, and sends `samples`, the number consumed, to the loggers.

    Args:
        plan: how many samples a step takes, and how they are cut.
        seed: of the sample order and of all random numbers.
        shares_streams: an IterableDataset is one stream for all ranks; else it splits itself, and its loaders run as
            they are.
    """

    def __init__(self, plan: BatchPlan, seed: int, shares_streams: bool = True) -> None:
        self.plan = plan
        self.seed = seed
        self.shares_streams = shares_streams
        self._resumed = Position(seed=seed, global_batch=plan.global_batch)
        self._states: list[Any] = []  # of the streams that a checkpoint was saved of
        self._loaders = Combined()
        self._are_shared = True  # of the loaders so far: the next one begins a new set
        self._epoch_start = self._resumed
        self._optimizer_steps = 0  # of the Trainer, at the epoch's start
        self._accumulation = Accumulation(())
        self._batches_a_step = 1  # in this epoch
        self._step_samples = plan.global_batch  # as told last
        self._batches = 0  # micro batches finished in this epoch
        self._own_batch: int | None = None  # samples a step of a loader that runs as it is
        self._validated_step = 0
        self._loss: Tensor | None = None
        self.step_loss: Tensor | None = None  # the mean over the global batch that was logged last
        self._drawn = torch.random.get_rng_state()  # the random state once model, data, callbacks and loggers are made

    # What is imposed on strategy and module: in every process, from setup to teardown.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy = trainer.strategy
        _check_replicas(trainer, self.plan)
        if trainer.state.fn == TrainerFn.FITTING:
            self._accumulation = Accumulation(trainer.callbacks)  # type: ignore[attr-defined]  # set by a connector
        process = strategy.process_dataloader
        patches.replace(strategy, "process_dataloader", lambda loader: process(self._share(trainer, loader)))
        # configure_model draws what a constructor would have drawn: from the same random state, in 32 bits, on the CPU
        torch.random.set_rng_state(self._drawn)
        patches.replace(strategy.precision_plugin, "tensor_init_context", nullcontext)
        if type(strategy).tensor_init_context is Strategy.tensor_init_context:
            patches.replace(strategy, "tensor_init_context", nullcontext)
        if trainer.world_size > 1:  # where it is 1, there is nothing to reduce; and Apple's GPUs have no 64-bit floats
            patches.replace(strategy, "reduce", exact_mean(strategy.reduce))
            patches.replace(pl_module, "log", synced_in_evaluation(trainer, pl_module.log))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for target, name in (
            (trainer.strategy, "process_dataloader"),
            (trainer.strategy, "reduce"),
            (trainer.strategy, "tensor_init_context"),
            (trainer.strategy.precision_plugin, "tensor_init_context"),
            (pl_module, "log"),
        ):
            patches.restore(target, name)

    def _share(self, trainer: Trainer, loader: Any) -> object:
        training = trainer.state.stage == RunningStage.TRAINING
        if training and self._are_shared:
            self._loaders, self._are_shared = Combined(lambda: _mode(trainer)), False
        if (reason := obstacle(loader) or self._split(loader)) is not None:
            if training:
                self._loaders.add_other(loader)
                _set_epoch(loader, self._resumed.epoch)
            _say_what_does_not_hold(trainer, reason, training, splits=obstacle(loader) is None)
            return loader
        assert isinstance(loader, DataLoader)
        rank = _data_rank(trainer)
        if is_stream(loader):
            shared = self._share_stream(trainer, loader, rank, training)
        elif training:
            shared = training_loader(loader, self.plan, rank, self.seed, self._resumed, self._loaders)
            self._bound_steps(trainer)
        else:
            shared = evaluation_loader(loader, self.plan, rank)
        if trainer.strategy.root_device.type == "cuda":
            pin(shared)
        return shared

    def _bound_steps(self, trainer: Trainer) -> None:
        """Let the Trainer know how many optimizer steps its epochs have, which a schedule may ask it for.

        It counts them by the accumulation of the moment.
        """
        epochs, limit, loop = trainer.max_epochs, trainer.limit_train_batches, trainer.fit_loop.epoch_loop
        if not self._accumulation.is_scheduled or epochs is None or epochs == -1 or limit is None:
            return
        steps = max(slices.steps for slices in self._loaders.slices)
        batches = min(steps, limit // self.plan.accumulation) if isinstance(limit, int) else int(steps * limit)
        most = self._accumulation.steps(epochs, batches)
        patches.replace(loop, "max_steps", most if loop.max_steps == -1 else min(most, loop.max_steps))

    def _split(self, loader: Any) -> str | None:
        """Return why a stream is taken to split itself by ranks; None where it does not."""
        if not is_stream(loader):
            return None
        if getattr(loader.dataset, "_distributed", None) is not None:  # Hugging Face's split_dataset_by_node
            return "its dataset splits itself by ranks"
        return None if self.shares_streams else "its dataset splits itself by ranks (data.sharded_by=dataset)"

    def _share_stream(self, trainer: Trainer, loader: DataLoader[Any], rank: int, training: bool) -> DataLoader[Any]:
        gather = functools.partial(_gather, trainer)
        if not training:
            return evaluation_stream(loader, self.plan, rank, self.seed, gather)
        shared = training_stream(loader, self.plan, rank, self.seed, self._resumed, gather, self._loaders)
        self._start_streams()
        if not self._loaders.is_sized and trainer.max_steps == -1 and not trainer.optimizers:
            raise Refused(
                "the module asks how long the run is, for a schedule, and the training stream has no len(): "
                "trainer.max_epochs does not bound its steps; type trainer.max_steps=N, or give the dataset a __len__"
            )
        if trainer.global_rank == 0 and (readers := self.plan.replicas * max(1, loader.num_workers)) > 1:
            log.info(
                "stream     %d readers, %d for each device, read all of it, and keep a part each",
                readers, max(1, loader.num_workers),
            )  # fmt: skip
        return shared

    def _start_streams(self) -> None:
        """Let loaders begin at the run's position; streams go on from the states that the checkpoint has, in order."""
        states = [*self._states, *(None for _ in self._loaders.slices)]
        for slices, state in zip(self._loaders.slices, states, strict=False):
            slices.start_at(self._resumed.epoch, self._resumed.step, state)

    # Training

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        at, loop = self._resumed, trainer.fit_loop
        self._loaders.check()
        if self._loaders.slices and (lost := at.other_dataset(self._loaders.samples)) is not None:
            raise Refused(
                f"{trainer.ckpt_path} can't be resumed: {lost}; to start from its weights alone, "
                f"type init_from={trainer.ckpt_path} and another run_id"
            )
        self._epoch_start = replace(
            at,
            step=0,
            global_step=at.global_step - at.step,
            samples=at.samples - at.step * self.plan.global_batch,
        )
        self._batches_a_step = self._accumulation.batches_a_step(at.epoch)
        self._optimizer_steps = trainer.global_step - -(-at.step // self._batches_a_step)
        self._batches = at.step * self.plan.accumulation
        if self._accumulation.is_scheduled:
            self._check_schedule()
            patches.replace(trainer, "accumulate_grad_batches", 1)  # which the scheduler asks for as it starts
        if at.step == 0:  # an epoch's start is no restart, whatever Lightning makes of it where max_steps is set
            for part in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
                patches.replace(part, "_restarting", False)
        if at.validation_due:
            _validate(trainer, _logged_steps(trainer, at) - 1)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._are_shared = True
        self._epoch_start = replace(self._position(trainer), epoch=trainer.current_epoch, step=0)
        self._optimizer_steps = trainer.global_step
        self._batches = 0
        self._batches_a_step = self._accumulation.batches_a_step(trainer.current_epoch)
        for loader in self._loaders.others:
            _set_epoch(loader, trainer.current_epoch)
        if self._loaders.slices:
            patches.replace(trainer.fit_loop._combined_loader, "_state_dicts", list)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._loaders.others and not self._loaders.slices:
            self._count_own_batch(trainer, batch)
        if self._accumulation.is_scheduled:
            self._take_accumulation(trainer)
        seed = mix(self.seed, self._epoch_start.global_step, self._batches, _data_rank(trainer))
        seed_generators(seed, trainer.strategy.root_device)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        weight = self._weight()
        if weight != 1.0:
            loss.register_hook(lambda gradient: gradient * weight)  # type: ignore[no-untyped-call]  # torch has no types for it

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        logged = _is_logged(trainer)
        if logged:
            self._add_loss(outputs)
        self._batches += 1
        if logged and (self._batches % self._micro_batches == 0 or self._at_epoch_end(trainer)):
            self._log_step(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._validated_step = self._position(trainer).global_step
            self._log_samples(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log_samples(trainer)

    def _check_schedule(self) -> None:
        """Check that the last step of an epoch is known before it is read, as steps take several batches.

        Raises:
            Refused: a stream, several loaders, or one that runs as it is.
        """
        known = self._loaders.is_single and any(type(slices) is TrainingSlices for slices in self._loaders.slices)
        if not known:
            raise Refused(
                "GradientAccumulationScheduler: how many samples the last step of an epoch has is known of a single "
                "data loader over samples with indices alone; leave it out, and type global_batch_size=N"
            )

    def _take_accumulation(self, trainer: Trainer) -> None:
        """Let the Trainer take the epoch's accumulation, and tell what shows the speed of a step."""
        patches.replace(trainer, "accumulate_grad_batches", self._micro_batches)
        samples = self.plan.global_batch * self._batches_a_step
        if samples == self._step_samples:
            return
        self._step_samples = samples
        for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by a connector
            if isinstance(callback, Throughput | Progress):
                callback.count(samples)
        if trainer.global_rank == 0:
            log.info(
                "batch      %d samples a step from epoch %d on = %d × global_batch_size, as scheduled",
                samples, trainer.current_epoch, self._batches_a_step,
            )  # fmt: skip

    def _count_own_batch(self, trainer: Trainer, batch: Any) -> None:
        """Tell how many samples a step takes where its batches are the loader's own, also to what shows the speed."""
        if self._own_batch is not None:
            return
        try:
            micro = extract_batch_size(batch)
        except MisconfigurationException:  # a batch without tensors
            micro = 0
        plan = self.plan
        self._own_batch = micro * plan.replicas * plan.accumulation
        if micro == 0 or self._own_batch == plan.global_batch:
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by a connector
            if isinstance(callback, Throughput | Progress):
                callback.count(self._own_batch)
        if trainer.global_rank == 0:
            own = replace(plan, global_batch=self._own_batch, micro_batch=micro)
            log.info("batch      %s, as the data loader makes them", own)

    def _weight(self) -> float:
        """Return the weight of this micro batch's mean in the mean over its global batch; 1.0 for an even cut."""
        if not (self._loaders.slices and self._loaders.is_single):  # of several loaders, each is cut evenly
            return 1.0
        step, micro = divmod(self._batches, self.plan.accumulation)
        weight = self._loaders.slices[0].weight(step, micro)
        return weight if self._batches_a_step == 1 else weight * self._share_of_step(step)

    def _share_of_step(self, batch: int) -> float:
        """Return the weight of a global batch's mean in the mean over its optimizer step, which may take several."""
        slices, several = self._loaders.slices[0], self._batches_a_step
        first = batch // several * several
        samples = [slices.step_samples(one) for one in range(first, min(first + several, slices.steps))]
        return samples[batch - first] * several / sum(samples)

    @property
    def _micro_batches(self) -> int:
        """Micro batches of an optimizer step."""
        return self.plan.accumulation * self._batches_a_step

    def _add_loss(self, outputs: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        if isinstance(loss, Tensor):  # Lightning has divided it by the accumulation
            share = loss.detach() * self._weight()
            self._loss = share if self._loss is None else self._loss + share

    def _log_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.step_loss = None
        if self._loss is not None:
            # Logged from here, after the module's own hooks, it replaces a `train/loss` of one micro batch.
            self.step_loss = trainer.strategy.reduce(self._loss, reduce_op="mean")
            pl_module.log("train/loss", self.step_loss, prog_bar=True)
        self._loss = None
        self._log_samples(trainer)

    def _log_samples(self, trainer: Trainer) -> None:
        if not self._loaders.slices or trainer.global_rank != 0:
            return
        position = self._position(trainer)
        for logger in trainer.loggers:  # not through `log`, whose 32-bit floats lose count at 16 million
            logger.log_metrics({"samples": position.samples}, step=max(0, _logged_steps(trainer, position) - 1))

    # Position

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        position = self._position(trainer)
        save_position(checkpoint, replace(position, validation_due=self._validation_due(trainer)))
        checkpoint[STREAMS] = [slices.state_at(position.step) for slices in self._loaders.slices]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        position = saved_position(checkpoint)
        if trainer.state.fn != TrainerFn.FITTING:
            if position is not None:  # metrics are logged at the step of the weights that are evaluated
                stepped = _logged_steps(trainer, position)
                patches.replace(trainer.fit_loop.epoch_loop, "_batches_that_stepped", stepped)
        else:
            assert position is not None, "a run goes on from no other checkpoint"
            self._resumed, self._states = position, checkpoint.get(STREAMS, [])
            self._start_streams()
            if (fetcher := trainer.fit_loop._data_fetcher) is not None:  # a module has asked how long the run is
                iter(fetcher)  # what it holds ahead is the first epoch's
            stepped = _logged_steps(trainer, position)
            rewrite_loops(checkpoint["loops"]["fit_loop"], position, self.plan.accumulation, stepped)

    def describe_position(self, trainer: Trainer, most_samples: int | None = None) -> str:
        """Return which batch this rank is in: stage, epoch, step, micro batch, and the indices of its samples.

        Args:
            most_samples: that are listed; None for all.
        """
        stage = trainer.state.stage or trainer.state.fn
        told = f"in {stage.value if stage else None}, epoch {trainer.current_epoch}, step {trainer.global_step}"
        if trainer.state.stage != RunningStage.TRAINING:
            return told
        step, micro = divmod(self._batches, self.plan.accumulation)
        parts = [slices.samples_of(step, micro) for slices in self._loaders.slices if step < slices.steps]
        samples = [str(sample) for part in parts for sample in part]
        shown = len(samples) if most_samples is None else most_samples
        return f"{told}, micro batch {micro}: samples {listed(samples, shown=shown)}" if samples else told

    def _position(self, trainer: Trainer) -> Position:
        start = self._epoch_start
        if (
            trainer.lightning_module.automatic_optimization
        ):  # also right in a hook that runs between the optimizer's step and the batch's end
            steps = (trainer.global_step - self._optimizer_steps) * self._batches_a_step
            step = min(steps, self._begun(trainer))
        else:
            step = self._batches // self.plan.accumulation
        samples = step * self.plan.global_batch
        if self._loaders.slices:
            samples = min(samples, self._loaders.epoch_samples)
        ended = step > 0 and self._at_epoch_end(trainer)
        return replace(
            start,
            epoch=start.epoch + ended,
            step=0 if ended else step,
            global_step=start.global_step + step,
            samples=start.samples + samples,
            dataset=self._loaders.samples or None,
            validation_due=False,
            optimizer_steps=trainer.global_step,
        )

    def _begun(self, trainer: Trainer) -> int:
        """Return the global batches that have begun in this epoch."""
        return -(-trainer.fit_loop.epoch_loop.batch_progress.current.ready // self.plan.accumulation)

    def _at_epoch_end(self, trainer: Trainer) -> bool:
        progress = trainer.fit_loop.epoch_loop.batch_progress
        is_last = progress.is_last_batch and self._batches >= progress.current.ready  # of a stream, known once fetched
        return is_last or self._batches >= trainer.num_training_batches

    def _validation_due(self, trainer: Trainer) -> bool:
        fetcher, loop = trainer.fit_loop._data_fetcher, trainer.fit_loop.epoch_loop
        global_step = self._position(trainer).global_step
        if fetcher is None or self._validated_step == global_step:
            return False
        finished = (global_step - self._epoch_start.global_step) * self.plan.accumulation
        if finished < loop.batch_progress.current.ready:  # the next has begun, for which Lightning would answer
            return False
        return loop._should_check_val_fx(fetcher)


def _gather(trainer: Trainer, number: int) -> list[int]:
    """Return what each rank has, in the order of ranks."""
    if trainer.world_size == 1:
        return [number]
    own = torch.tensor(number, device=trainer.strategy.root_device)
    gathered = [torch.empty_like(own) for _ in range(trainer.world_size)]
    torch.distributed.all_gather(gathered, own)
    return [int(one) for one in gathered]


def _set_epoch(loader: object, epoch: int) -> None:
    """Tell a dataset that shuffles by the epoch which one it is."""
    set_epoch = getattr(getattr(loader, "dataset", None), "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


def _data_rank(trainer: Trainer) -> int:
    """Return this process's rank among those that read different samples.

    Ranks that hold one layer together (tensor parallelism) have the same one: they read the same samples and drop
    the same units.
    """
    return int((trainer.distributed_sampler_kwargs or {}).get("rank", 0))


def _check_replicas(trainer: Trainer, plan: BatchPlan) -> None:
    """Check that as many processes read different samples as the global batch was cut for.

    Raises:
        Refused: they are fewer or more, so that a step would take another number of samples.
    """
    found = int((trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1))
    if found != plan.replicas:
        raise Refused(
            f"the global batch is cut for {plan.replicas} devices, and {type(trainer.strategy).__name__} has {found} "
            "that read different samples; give trainer.devices and trainer.num_nodes as numbers"
        )


def _is_logged(trainer: Trainer) -> bool:
    every_n_steps: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set past Lightning's declaration
    if every_n_steps == 0:  # which means never
        return False
    return (trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % every_n_steps == 0


def _logged_steps(trainer: Trainer, position: Position) -> int:
    """Return the steps that loggers are told of: optimizer steps, but batches of a module that optimizes by hand."""
    return position.steps if trainer.lightning_module.automatic_optimization else position.global_step


def _mode(trainer: Trainer) -> str:
    assert trainer.fit_loop._combined_loader is not None
    return trainer.fit_loop._combined_loader._mode


def _validate(trainer: Trainer, logged_step: int) -> None:
    """Run the validation that was due where the checkpoint was written; Lightning skips it when it resumes."""
    loop = trainer.fit_loop.epoch_loop
    stepped = loop._batches_that_stepped
    patches.replace(loop, "_batches_that_stepped", logged_step)
    patches.replace(trainer, "validating", True)
    loop.val_loop.run()
    patches.replace(trainer, "training", True)
    patches.replace(loop, "_batches_that_stepped", stepped)


def _say_what_does_not_hold(trainer: Trainer, reason: str, training: bool, splits: bool) -> None:
    if splits:
        lost = (
            "which samples a step takes follows it and the number of devices, a resumed run starts its epoch anew, and "
            "ranks must end at the same batch; weights and checkpoints are as always"
            if training
            else "what each rank evaluates follows it"
        )
    elif training:
        lost = "batch size and order are its own, and a resumed run starts its epoch anew"
        shared = "; every rank reads the same samples unless it splits them itself" if trainer.world_size > 1 else ""
        lost += shared
    else:
        lost = "samples may be counted twice" if trainer.world_size > 1 else ""
    if lost and trainer.global_rank == 0:
        log.warning("a data loader runs as it is, because %s: %s", reason, lost)
