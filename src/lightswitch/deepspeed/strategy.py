"""DeepSpeed's ZeRO as a strategy, on GPUs and, without compiled operators, on CPUs."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers, do_nothing_closure
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, Precision
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.types import STEP_OUTPUT, LRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightswitch import patches
from lightswitch.batches.callback import GlobalBatch
from lightswitch.checkpoints import names
from lightswitch.deepspeed import config as zero_config
from lightswitch.deepspeed import disk, placement
from lightswitch.deepspeed.placement import ZeroPrecision
from lightswitch.deepspeed.quiet_import import cpu_accelerator, deepspeed
from lightswitch.deepspeed.state import PortableDeepSpeed
from lightswitch.deepspeed.writes import WeightGuard
from lightswitch.errors import Refused, listed
from lightswitch.mixins import callbacks_of
from lightswitch.strategies.elementwise import refuse_in_pieces
from lightswitch.strategies.kernels import fuse
from lightswitch.strategies.known_callbacks import is_on_nvme
from lightswitch.strategies.manual_gradients import around_passes
from lightswitch.strategies.replicas import broadcast_in_place, fill_with_nothing, placeholders
from lightswitch.strategies.sharded import set_timeouts
from lightswitch.strategies.trained import Trained, UnusedParameters
from lightswitch.strategies.units import is_compiled
from lightswitch.strategies.writes import WatchedWeights, refuse_bounded_rows

# DeepSpeed 0.19 calls collectives by their names before torch 2.13
warnings.filterwarnings("ignore", r"`torch.distributed.\w+_tensor` is deprecated", FutureWarning)

log = logging.getLogger(__name__)


class DeepSpeed(WatchedWeights, PortableDeepSpeed, DeepSpeedStrategy):
    """ZeRO by DeepSpeed for unmodified models, with the arguments of Lightning's DeepSpeedStrategy.

    The model is built on the CPU, with the same values as in one process. At stage 3, it is then moved to the device
    and partitioned parameter by parameter, so that no device holds the whole model. Only one process holds all of the
    modules that `configure_model` builds.

    Args:
        config: a DeepSpeed config, as a path or a dict, in which "auto" takes the run's value, or DeepSpeed's default
            where the run has none.
        accelerator, parallel_devices, cluster_environment, precision_plugin: set by the Trainer.
        process_group_backend: backend of torch.distributed; None for the device's default.
        timeout: how long a rank waits for another in a collective, as a timedelta.
    """

    _trained: Trained
    _unused: UnusedParameters
    _guard: WeightGuard | None = None  # of an engine's weights
    _hooks: Sequence[RemovableHandle] = ()

    # Configuration

    def _load_config(self, config: Any) -> dict[str, Any] | None:
        """Return a copy of the config, because Lightning writes into it; ignore Lightning's environment variable.

        Raises:
            Refused: DeepSpeed has no such key in a block, or takes no such value of it.
        """
        if config is None:
            return None
        found = zero_config.read(config) if isinstance(config, str | Path) else copy.deepcopy(config)
        try:
            deepspeed.DeepSpeedConfig(zero_config.of_any_run(found))
        except ValueError as error:
            invalid: Any = error  # pydantic's, of which DeepSpeed's classes are
            wrong = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in invalid.errors())
            raise Refused(
                f"trainer.strategy.config: {'; '.join(wrong)} ({invalid.title}); correct it, or leave it out"
            ) from error
        return found

    def _format_config(self) -> None:
        assert self.config is not None
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        callbacks = callbacks_of(trainer)
        plan = next((callback.plan for callback in callbacks if isinstance(callback, GlobalBatch)), None)
        run = zero_config.Run(
            precision=str(trainer.precision),
            micro_batch=plan.micro_batch if plan else 1,
            accumulation=trainer.accumulate_grad_batches,
            replicas=self.world_size,
            clip_norm=float(trainer.gradient_clip_val or 0),
        )
        self.config = zero_config.resolved(self.config, run)
        if self.config.get("fp16", {}).get("enabled"):
            self.config["fp16"] = {**self._loss_scaling, **self.config["fp16"]}
        told = zero_config.other_precision(self.config, run.precision)
        if told is not None and self.global_rank == 0:
            log.warning("%s", told)
        if not self.lightning_module.automatic_optimization:
            self.config["managed_gradient_accumulation"] = False  # a step uses all backward passes since the last
            if not self.zero_stage_3 and self.config["zero_optimization"]["stage"] < 2:
                self.config["zero_optimization"]["overlap_comm"] = False  # DeepSpeed rejects the combination
        self._use_disk(Path(trainer.default_root_dir))
        if isinstance(self.precision_plugin, ZeroPrecision):
            self.precision_plugin.autocasts = "torch_autocast" in self.config
            self.precision_plugin.steps_by_hand = not self.lightning_module.automatic_optimization

    def _use_disk(self, run_dir: Path) -> None:
        """Give what is offloaded to disk a folder of this run, and load the operator that writes it. Collective."""
        assert self.config is not None
        zero = self.config["zero_optimization"]
        for block in (blocks := zero_config.blocks_on_disk(zero)):
            block["nvme_path"] = str(folder := disk.folder_of(block["nvme_path"], run_dir))
            disk.open_folder(folder, self.global_rank, self.local_rank == 0)
        if blocks:
            zero.setdefault("stage3_max_reuse_distance", 0)  # a parameter that is kept takes a buffer
            disk.load_operator()
            self.barrier()

    @property
    def _loss_scaling(self) -> dict[str, float]:
        names = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
        return {name: getattr(self, name) for name in names}

    @property
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if isinstance(plugin, DeepSpeedPrecision) and not isinstance(plugin, ZeroPrecision):
            plugin = ZeroPrecision(plugin.precision)  # type: ignore[arg-type]  # declared wider than what it takes
        self._precision_plugin = plugin

    # Processes

    @property
    def root_device(self) -> torch.device:
        device = super().root_device
        return torch.device("cpu", 0) if device.type == "cpu" else device  # DeepSpeed needs an index

    def setup_environment(self) -> None:
        assert self.accelerator is not None
        if isinstance(self.accelerator, CPUAccelerator):
            deepspeed.accelerator.set_accelerator(_CPU())
        self.accelerator.setup_device(self.root_device)
        self.setup_distributed()

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    # Model

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        set_timeouts(self._timeout)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        with self.precision_plugin.tensor_init_context():  # not on the device, whose random numbers differ
            yield

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Context in which ranks other than 0 build placeholders at stage 3.

        It does not use `deepspeed.zero.Init`, under which changes of a module to its children's parameters are lost or
        fail.
        """
        self._init_config_if_needed()
        assert self.lightning_module is not None
        with placeholders() if self.zero_stage_3 and self.global_rank > 0 else nullcontext():
            yield
        fill_with_nothing(self.lightning_module)

    def _init_optimizers(self) -> tuple[Optimizer, LRSchedulerConfig | None]:
        """Create the optimizer before the parameters are partitioned: `configure_optimizers` may read their shapes.

        Raises:
            Refused: there is not exactly one optimizer, or it or the parameters' dtypes are not supported.
        """
        assert self.lightning_module is not None
        optimizer, schedulers = _configured(self.lightning_module)
        refuse_in_pieces(optimizer)
        refuse_bounded_rows(self.lightning_module)
        casts = str(self.lightning_module.trainer.precision) in ("16-true", "bf16-true")
        placement.refuse_other_dtypes(self.lightning_module, None if casts else torch.float32)
        fuse(optimizer)  # before DeepSpeed makes its states
        self.remember_groups(optimizer)
        if self.global_rank == 0:
            _tell_of_hooks(self.lightning_module)
        placement.let_compiled_modules_hold_parameters()
        self._place(self.lightning_module)
        # the weights are broadcast already, and DeepSpeed 0.19 fails for a scalar parameter
        patches.replace(deepspeed.DeepSpeedEngine, "_broadcast_model", lambda self: None)
        return optimizer, schedulers[0] if schedulers else None

    def _setup_model_and_optimizer(
        self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[deepspeed.DeepSpeedEngine, Optimizer]:
        """Make DeepSpeed's engine over the trained parameters, and record those without a gradient. Collective."""
        if optimizer is None:  # nothing is trained
            made: tuple[deepspeed.DeepSpeedEngine, Optimizer] = super()._setup_model_and_optimizer(model, optimizer)
            self._guard_weights(made[0], model)
            return made
        with _trained_groups(model, optimizer, self.zero_stage_3):
            engine, stepped = super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)
        if engine.managed_gradient_accumulation():
            engine.set_gradient_accumulation_boundary(True)  # the engine must not count micro-batches
        else:  # manual optimization: a module may also step without Lightning's wrapper
            patches.replace(stepped, "step", partial(self._step, engine, stepped.step))
        self._trained, in_groups = Trained(model), {name for group in self._group_names for name in group}
        parameters = {name: one for name, one in names.parameters(model).items() if name in in_groups}
        self._unused = UnusedParameters(parameters)
        self._guard_weights(engine, model)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._unused.mark_used)  # type: ignore[no-untyped-call]  # untyped in torch
            for parameter in parameters.values()
            if parameter.requires_grad
        ]
        return engine, stepped

    def _guard_weights(self, engine: deepspeed.DeepSpeedEngine, model: nn.Module) -> None:
        sees_steps = "training_step" not in vars(model) and not any(map(is_compiled, model.modules()))
        self._guard = WeightGuard(engine, model, sees_steps)

    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        if self.zero_stage_3:
            placement.refuse_other_dtypes(model, None)
        self._place(model)
        if self.zero_stage_3:
            model, _ = self._setup_model_and_optimizer(model, None)
        self.model = model

    def _place(self, model: nn.Module | None) -> None:
        """Broadcast rank 0's weights and buffers to each device; at stage 3, shard the weights."""
        assert model is not None
        assert self.config is not None
        if self.zero_stage_3:
            disk.fit_buffers(self.config["zero_optimization"], model, self.world_size)
            placement.partition(model, self.config, self.root_device)
        else:
            placement.replicate(model, self.config, self.root_device)
        self._share_buffers()

    def _share_buffers(self) -> None:
        """Broadcast rank 0's buffers, as DDP does: the statistics of batch norms differ by rank."""
        assert self.lightning_module is not None
        broadcast_in_place(self.lightning_module.buffers())

    def parameters_changed(self) -> None:
        super().parameters_changed()
        self._share_buffers()  # each rank averages its own batch norm statistics

    def on_validation_start(self) -> None:
        self._share_buffers()

    def on_test_start(self) -> None:
        self._share_buffers()

    def on_predict_start(self) -> None:
        self._share_buffers()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Step, after checking that each parameter has a gradient.

        Raises:
            Refused: a parameter took no part in the loss; DeepSpeed steps whole groups, and can't leave it out.
        """

        def closure_of_all() -> Any:
            output = closure()
            assert self.lightning_module is not None
            if unused := self._unused.of_step():
                raise Refused(
                    f"{listed(unused, 'parameters')} did not contribute to the loss of step "
                    f"{self.lightning_module.global_step}, but DeepSpeed also updates parameters without a gradient; "
                    "freeze unused ones (requires_grad=False), or use strategy=fsdp"
                )
            # Lightning takes None for a step without a loss, but a module's optimizer_step may have called its closure
            has_closed = closure is do_nothing_closure and not self.looks.is_at_work
            return closure if has_closed else output

        with self.outside_of_hooks():
            self._examine_manual_step()
            output = super().optimizer_step(optimizer, closure_of_all, *args, **kwargs)
        if getattr(self.optimizers[0], "custom_loss_scaler", False):  # it is for this step's gradients only
            patches.replace(self.optimizers[0], "custom_loss_scaler", False)
        self._share_buffers()
        return output

    def _step(self, engine: Any, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Step DeepSpeed's engine instead of its optimizer, unless the engine is calling."""
        if engine._running_engine_step:
            return step(*args, **kwargs)
        with self.outside_of_hooks():
            self._examine_manual_step()
            return engine.step()

    def _examine_manual_step(self) -> None:
        """Check, within a training step that is examined, that it has written no weights before its optimizer's step.

        Raises:
            Refused: it has.
        """
        if self._guard and self.looks.is_at_work and self.looks.is_due:
            self._guard.refuse_all_written(self._step_name)

    @property
    def _step_name(self) -> str:
        return f"training_step of {type(self.lightning_module).__name__}"

    def multiply_gradients(self, optimizer: Optimizer, factor: Tensor) -> None:
        """Multiply the gradients of this step through the loss scale: DeepSpeed's engine holds the gradients, and
        divides them by it."""
        zero: Any = self.optimizers[0]
        patches.replace(zero, "external_loss_scale", zero.loss_scale / factor.item())
        patches.replace(zero, "custom_loss_scaler", True)

    _is_in_backward = False  # a backward pass of Lightning's is running

    def _refuse_own_pass(self, run: Callable[..., Any], accumulates: bool, *args: Any, **kwargs: Any) -> Any:
        if accumulates and not self._is_in_backward:
            raise Refused(
                f"training_step of {type(self.lightning_module).__name__} calls backward() on a tensor itself, but "
                "DeepSpeed only reduces and steps the gradients of self.manual_backward(loss); call that, or use "
                "strategy=ddp or fsdp"
            )
        return run(*args, **kwargs)

    # Weights that are read or written outside of the optimizer

    def whole_weights(self, hook: str) -> AbstractContextManager[None]:
        return self._guard.in_hook(hook) if self._guard else super().whole_weights(hook)

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        assert self.lightning_module is not None
        is_automatic = self.lightning_module.automatic_optimization
        with (
            self.looks.step(),
            self._guard.in_step(self._step_name, self.looks.is_due) if self._guard else nullcontext(),
            nullcontext() if is_automatic else around_passes(self._refuse_own_pass),
        ):
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._in_evaluation("validation_step"):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._in_evaluation("test_step"):
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._in_evaluation("predict_step"):
            return super().predict_step(*args, **kwargs)

    @contextmanager
    def _in_evaluation(self, step: str) -> Iterator[None]:
        module = self.lightning_module
        assert module is not None
        if self._guard is None:
            yield
            return
        with (
            self.looks.evaluation(step),
            self._guard.in_step(f"{step} of {type(module).__name__}", self.looks.is_due),
        ):
            yield

    @property
    def handles_gradient_accumulation(self) -> bool:
        """False, so that Lightning handles gradient accumulation, also in the shorter last step of an epoch.

        DeepSpeed's engine would always step after the same number of micro-batches.
        """
        return False

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients in DeepSpeed's engine, in all micro-batches of a step but the last."""
        assert isinstance(self.model, deepspeed.DeepSpeedEngine)
        if not self.model.managed_gradient_accumulation():  # manual optimization: the module decides when to step
            yield
            return
        self.model.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self.model.set_gradient_accumulation_boundary(True)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward pass, without dividing the loss again: Lightning has divided it by the accumulation."""
        assert isinstance(self.model, deepspeed.DeepSpeedEngine)
        if not self.model.managed_gradient_accumulation():
            self.model.optimizer.clear_backward_seen_flag()  # or stage 3 accumulates only after a forward pass
        self._is_in_backward = True
        with self.outside_of_hooks():
            output = super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **kwargs)
        self._is_in_backward = False  # no try/finally: an error ends the run
        return output

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Check that the trained parameters are those that the engine was set up over, and the same on all ranks.

        Raises:
            Refused: `requires_grad` of some has changed since, or not all ranks use the same ones.
        """
        super().pre_backward(closure_loss)
        assert self.lightning_module is not None
        if changed := self._trained.changes():
            raise Refused(
                f"requires_grad of {listed(list(changed), 'parameters')} has changed since the run began (step "
                f"{self.lightning_module.global_step}), but DeepSpeed trains the parameters that require gradients "
                "when it is set up; set it in the module's constructor, or use strategy=fsdp"
            )
        engine, unused = self.model, self._unused
        assert isinstance(engine, deepspeed.DeepSpeedEngine)
        in_each_pass = engine.zero_optimization_stage() > 1
        if closure_loss.requires_grad and (in_each_pass or engine.is_gradient_accumulation_boundary()):
            closure_loss.register_hook(lambda _: unused.refuse_uneven(in_each_pass))  # type: ignore[no-untyped-call]  # the library has no types for it

    def lightning_module_state_dict(self) -> dict[str, Any]:
        with self.outside_of_hooks():  # a callback's hook may save
            return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        with self.outside_of_hooks():
            return super().optimizer_state(optimizer)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self.outside_of_hooks():
            super().save_checkpoint(*args, **kwargs)
        if is_on_nvme(self):
            self.wait_for_write()  # the next step changes the files, of which there is no copy

    def teardown(self) -> None:
        self.release_engine()
        super().teardown()

    def release_engine(self) -> None:
        """Destroy DeepSpeed's engine and remove its hooks, which would run beside those of the next engine."""
        engine, self._guard = self.model, None
        if not isinstance(engine, deepspeed.DeepSpeedEngine):
            return
        if self.zero_stage_3:
            for parameter in engine.module.parameters():
                parameter.ds_active_sub_modules.clear()  # left over if an error ended a forward pass
                # small ones are whole: moved to the CPU, they would still count as available on the device
                if parameter.numel():
                    parameter.partition()
        for hook in self._hooks:
            hook.remove()
        engine.module_forward_pre_hook.remove()
        engine.module_forward_post_hook.remove()
        engine.destroy()


def _configured(module: LightningModule) -> tuple[Optimizer, list[LRSchedulerConfig]]:
    """Return a module's optimizer, and its schedule, if it has one.

    Raises:
        Refused: there is not exactly one optimizer, or there are several schedules.
    """
    optimizers, schedulers = _init_optimizers_and_lr_schedulers(module)
    if len(optimizers) != 1 or len(schedulers) > 1:
        raise Refused(
            "DeepSpeed supports one optimizer and at most one scheduler, but configure_optimizers of "
            f"{type(module).__name__} returns {len(optimizers)} and {len(schedulers)}; use strategy=ddp or fsdp"
        )
    return optimizers[0], schedulers


@contextmanager
def _trained_groups(module: nn.Module, optimizer: Optimizer, zero_3: bool) -> Iterator[None]:
    """Leave only trained parameters in an optimizer's groups, because DeepSpeed steps no others.

    A group without trained parameters gets an unused placeholder, because schedules count groups and DeepSpeed fails
    for such a group at stages 1 and 2 (0.19). Within the context, the placeholder is a parameter of the module: these
    stages also look up the name of each parameter.
    """
    some = next(parameter for group in optimizer.param_groups for parameter in group["params"])
    put: list[str] = []
    for group in optimizer.param_groups:
        trained = [parameter for parameter in group["params"] if parameter.requires_grad]
        if not trained:
            put.append(name := f"in_place_of_group_{len(put)}")
            nothing = torch.zeros(1, dtype=some.dtype, device=some.device)
            module.register_parameter(name, nn.Parameter(nothing, requires_grad=not zero_3))
        group["params"] = trained or [getattr(module, name)]
    yield
    for name in put:
        delattr(module, name)


def _tell_of_hooks(module: LightningModule) -> None:
    hooks = [name for name in ("on_after_backward", "on_before_optimizer_step") if is_overridden(name, module)]
    if hooks:
        log.warning(
            "%s of %s: DeepSpeed does not expose gradients, so p.grad is None there; use strategy=ddp or fsdp if the "
            "module reads or changes gradients", " and ".join(hooks), type(module).__name__,
        )  # fmt: skip


class _CPU(cpu_accelerator.CPU_Accelerator):  # type: ignore[misc]  # the library has no types for it
    """CPU accelerator without the shared-memory collectives, which only inference uses.

    DeepSpeed would compile test programs for a minute to find out whether it can compile that operator.
    """

    def create_op_builder(self, op_name: str) -> Any:
        return None if op_name == "ShareMemCommBuilder" else super().create_op_builder(op_name)
