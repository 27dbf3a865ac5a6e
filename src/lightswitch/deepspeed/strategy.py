"""DeepSpeed's ZeRO as a strategy, on GPUs and, without compiled operators, on CPUs."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers, do_nothing_closure
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightswitch import patches
from lightswitch.batches.callback import GlobalBatch
from lightswitch.checkpoints import names
from lightswitch.deepspeed import config as zero_config
from lightswitch.deepspeed.guard import ParameterUse, WeightGuard
from lightswitch.deepspeed.state import PortableDeepSpeed, deepspeed
from lightswitch.errors import Refused, listed
from lightswitch.hooked_strategy import Mixin, callbacks_of, with_mixin
from lightswitch.strategies.agreement import (
    broadcast_in_place,
    broadcast_metric_states,
    leave_meta,
)
from lightswitch.strategies.callbacks import fuse
from lightswitch.strategies.elementwise import refuse_in_pieces
from lightswitch.strategies.sharded import refuse_scripted
from lightswitch.strategies.units import is_compiled
from lightswitch.strategies.weights import WatchedWeights

# DeepSpeed 0.19 calls collectives by their names before torch 2.13
warnings.filterwarnings("ignore", r"`torch.distributed.\w+_tensor` is deprecated", FutureWarning)

_cpu_accelerator: Any = importlib.import_module("deepspeed.accelerator.cpu_accelerator")


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

    _use: ParameterUse
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
        if not self.lightning_module.automatic_optimization:
            self.config["managed_gradient_accumulation"] = False  # a step uses all backward passes since the last
            if not self.zero_stage_3 and self.config["zero_optimization"]["stage"] < 2:
                self.config["zero_optimization"]["overlap_comm"] = False  # DeepSpeed rejects the combination
        self.precision_plugin = plugin = with_mixin(ZeroPrecision, self.precision_plugin)
        plugin.autocasts = "torch_autocast" in self.config
        plugin.steps_by_hand = not self.lightning_module.automatic_optimization

    @property
    def _loss_scaling(self) -> dict[str, float]:
        names = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
        return {name: getattr(self, name) for name in names}

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
        if isinstance(self.model, deepspeed.DeepSpeedEngine):  # it makes a group without a timeout
            self.model.data_parallel_group.set_timeout(self._timeout)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        with self.precision_plugin.tensor_init_context():  # not on the device, whose random numbers differ
            yield

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Context in which ranks other than 0 build on the meta device at stage 3, where nothing takes memory.

        It does not use `deepspeed.zero.Init`, under which changes of a module to its children's parameters are lost or
        fail.
        """
        self._init_config_if_needed()
        with torch.device("meta") if self.zero_stage_3 and self.global_rank > 0 else nullcontext():
            yield
        if self.zero_stage_3:
            leave_meta(self.lightning_module)

    def init_deepspeed(self) -> None:
        """Make DeepSpeed's engine, whose optimizer steps the trained parameters. Collective.

        An evaluation has an engine at stage 3 alone, where it gathers weights.
        """
        model = self.lightning_module
        if model.trainer.training:
            self._init_training(model)
            return
        if self.zero_stage_3:
            _refuse_other_dtypes(model, None)
        self._place(model)
        if self.zero_stage_3:
            self.model, _ = self._setup_model_and_optimizer(model, None)
            self._guard_weights(self.model, model)

    def _init_training(self, module: LightningModule) -> None:
        """Create the optimizer before the parameters are partitioned, as `configure_optimizers` may read their shapes;
        then the engine, with a record of the parameters without a gradient.

        Raises:
            Refused: there is not exactly one optimizer, or it or the parameters' dtypes are not supported.
        """
        optimizer, schedules = _configured(module)
        refuse_in_pieces(optimizer)
        casts = str(module.trainer.precision) in ("16-true", "bf16-true")
        _refuse_other_dtypes(module, None if casts else torch.float32)
        fuse(optimizer)  # before DeepSpeed makes its states
        self.remember_groups(optimizer)
        self._place(module)
        _leave_trained(optimizer)
        # the weights are broadcast already, and DeepSpeed 0.19 fails for a scalar parameter
        patches.replace(deepspeed.DeepSpeedEngine, "_broadcast_model", lambda self: None)
        engine, stepped = self._setup_model_and_optimizer(module, optimizer)
        self._set_deepspeed_activation_checkpointing()
        self.model, self.optimizers, self.lr_scheduler_configs = engine, [stepped], schedules
        optimizer.register_step_pre_hook(self._before_step)  # DeepSpeed has stepped it once, to make its states
        if engine.managed_gradient_accumulation():
            engine.set_gradient_accumulation_boundary(True)  # the engine must not count micro-batches
        in_groups = {name for group in self._group_names for name in group}
        parameters = names.parameters(module)
        self._all = {name: (one, one.requires_grad) for name, one in parameters.items()}
        self._use = ParameterUse({name: one for name, one in parameters.items() if name in in_groups})
        self._guard_weights(engine, module)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._mark_used)  # type: ignore[no-untyped-call]  # untyped in torch
            for parameter in self._use.parameters.values()
        ]

    def _guard_weights(self, engine: deepspeed.DeepSpeedEngine, model: nn.Module) -> None:
        sees_steps = "training_step" not in vars(model) and not any(map(is_compiled, model.modules()))
        self._guard = WeightGuard(engine, model, sees_steps)

    def _place(self, model: nn.Module) -> None:
        """Broadcast rank 0's weights and buffers to each device; at stage 3, shard the weights.

        Raises:
            Refused: stage 3 can't shard a parameter, or a module that holds some.
        """
        assert self.config is not None
        dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16}
        dtype = next((dtype for name, dtype in dtypes.items() if self.config.get(name, {}).get("enabled")), None)
        for parameter in model.parameters() if dtype is not None else ():
            if parameter.is_floating_point() and not hasattr(parameter, "ds_id"):
                parameter.data = parameter.data.to(dtype)
        if self.zero_stage_3:
            _refuse_unsharded(model)
            for unit in filter(is_compiled, model.modules()):
                # as one, and not module by module: its compiled graph would break at the hooks of each module
                deepspeed.utils.set_z3_leaf_module(unit, True)
            deepspeed.zero.Init(module=model, config_dict_or_path=self.config)
            model.to(self.root_device)  # buffers and metrics
        else:
            model.to(self.root_device)
            for parameter in model.parameters():
                broadcast_in_place([parameter])
        self._share_buffers()
        broadcast_metric_states(model, self.root_device)

    def _share_buffers(self) -> None:
        """Broadcast rank 0's buffers, as DDP does: the statistics of batch norms differ by rank."""
        broadcast_in_place(self.lightning_module.buffers())

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        if closure is do_nothing_closure and self.lightning_module.automatic_optimization:
            # a module's optimizer_step has called its closure; Lightning takes None for a step without a loss
            closure = lambda: True  # noqa: E731
        with self.outside_of_hooks():
            output = super().optimizer_step(optimizer, closure, *args, **kwargs)
        self._use.used.clear()
        if getattr(self.optimizers[0], "custom_loss_scaler", False):  # it is for this step's gradients only
            patches.replace(self.optimizers[0], "custom_loss_scaler", False)
        self._share_buffers()
        return output

    def _before_step(self, *_: Any) -> None:
        """Check the step of the user's optimizer, over DeepSpeed's flat groups.

        Raises:
            Refused: a module steps past the engine, which also reduces gradients; or has written weights, in a step
                that is examined; or a parameter took no part in the loss, which DeepSpeed can't leave out.
        """
        module, engine = self.lightning_module, self.model
        assert isinstance(engine, deepspeed.DeepSpeedEngine)
        if not engine._running_engine_step:
            raise Refused(
                f"training_step of {type(module).__name__} steps the optimizer inside of the wrapper "
                "(self.optimizers().optimizer.step()), and DeepSpeed only reduces gradients in a step of its engine; "
                "call self.optimizers().step(), or use strategy=ddp or fsdp"
            )
        if self._guard and self.is_examined:  # an optimizer's step within a training step
            self._guard.refuse_all_written(f"training_step of {type(module).__name__}")
        if unused := self._use.unused():
            raise Refused(
                f"{listed(unused, 'parameters')} did not contribute to the loss of step {module.global_step}, but "
                "DeepSpeed also updates parameters without a gradient; freeze unused ones (requires_grad=False), or "
                "use strategy=fsdp"
            )

    def multiply_gradients(self, optimizer: Optimizer, factor: Tensor) -> None:
        """Multiply the gradients of this step through the loss scale: DeepSpeed's engine holds the gradients, and
        divides them by it."""
        zero: Any = self.optimizers[0]
        zero.override_loss_scale(zero.loss_scale / factor.item())

    def _mark_used(self, parameter: Tensor) -> None:
        """Record that a pass has computed a parameter's gradient.

        Raises:
            Refused: the pass is `loss.backward()`, which DeepSpeed's engine does not know of.
        """
        if not self.is_in_backward:
            raise Refused(
                f"training_step of {type(self.lightning_module).__name__} calls backward() on a tensor itself, but "
                "DeepSpeed only reduces and steps the gradients of self.manual_backward(loss); call that, or use "
                "strategy=ddp or fsdp"
            )
        self._use.used.add(parameter)

    # Weights that are read or written outside of the optimizer

    def whole_weights(self, hook: str) -> AbstractContextManager[Any]:
        return self._guard.in_hook(hook) if self._guard else nullcontext()

    def run_step(self, step: str, *args: Any, **kwargs: Any) -> Any:
        if self.model is self.lightning_module:  # there is no engine in an evaluation at stages 1 and 2
            return getattr(self.lightning_module, step)(*args, **kwargs)
        return super().run_step(step, *args, **kwargs)

    def around_step(self, step: str) -> AbstractContextManager[None]:
        return self._guard.in_step(step) if self._guard and self.is_examined else nullcontext()

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
        return super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **kwargs)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Check that the trained parameters are those that the engine was set up over, and the same on all ranks.

        Raises:
            Refused: `requires_grad` of some has changed since, or not all ranks use the same ones.
        """
        super().pre_backward(closure_loss)
        if changed := [name for name, (one, was_trained) in self._all.items() if one.requires_grad != was_trained]:
            raise Refused(
                f"requires_grad of {listed(changed, 'parameters')} has changed since the run began (step "
                f"{self.lightning_module.global_step}), but DeepSpeed trains the parameters that require gradients "
                "when it is set up; set it in the module's constructor, or use strategy=fsdp"
            )
        engine, use = self.model, self._use
        assert isinstance(engine, deepspeed.DeepSpeedEngine)
        in_each_pass = engine.zero_optimization_stage() > 1
        if closure_loss.requires_grad and (in_each_pass or engine.is_gradient_accumulation_boundary()):
            closure_loss.register_hook(lambda _: use.refuse_uneven(in_each_pass))  # type: ignore[no-untyped-call]  # the library has no types for it

    def teardown(self) -> None:
        if isinstance(self.model, deepspeed.DeepSpeedEngine):
            self._release(self.model)
        self._guard = None
        super().teardown()

    def _release(self, engine: deepspeed.DeepSpeedEngine) -> None:
        """Destroy DeepSpeed's engine and remove its hooks, which would run beside those of the next engine."""
        if self.zero_stage_3:
            for parameter in engine.module.parameters():
                parameter.ds_active_sub_modules.clear()  # left over if an error ended a forward pass
                # small ones are whole: moved to the CPU, they would still count as available on the device
                if parameter.numel():
                    parameter.partition()
        for hook in (*self._hooks, engine.module_forward_pre_hook, engine.module_forward_post_hook):
            hook.remove()
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


def _leave_trained(optimizer: Optimizer) -> None:
    """Leave only trained parameters in an optimizer's groups, because DeepSpeed steps no others.

    Raises:
        Refused: a group has none, for which DeepSpeed fails (0.19).
    """
    for index, group in enumerate(optimizer.param_groups):
        group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
        if not group["params"]:
            raise Refused(
                f"parameter group {index} of {type(optimizer).__name__} is frozen, and DeepSpeed can't step a group "
                "without trained parameters; leave it out of configure_optimizers, or use strategy=fsdp"
            )


def _refuse_other_dtypes(model: nn.Module, kept_in: torch.dtype | None) -> None:
    """Check that all parameters can be flattened together.

    Args:
        kept_in: the dtype that they must have; None for that of the first one.

    Raises:
        Refused: a parameter is complex, or has another dtype.
    """
    for name, parameter in names.parameters(model).items():
        kept_in = kept_in or parameter.dtype
        if parameter.dtype != kept_in or parameter.is_complex():
            raise Refused(
                f"{name} has dtype {parameter.dtype}, but DeepSpeed needs one real dtype for all parameters; use "
                "strategy=fsdp or ddp"
            )


def _refuse_unsharded(model: nn.Module) -> None:
    """Check that stage 3 of DeepSpeed 0.19 can shard the parameters.

    Raises:
        Refused: one is a scalar or empty, or a module that holds some is scripted or wrapped by torch.compile.
    """
    refuse_scripted(model)
    for name, parameter in names.parameters(model).items():
        if not hasattr(parameter, "ds_id") and (parameter.ndim == 0 or parameter.numel() == 0):
            has = "no elements" if parameter.ndim else "no dimension"
            raise Refused(
                f"{name} has {has}, and DeepSpeed's stage 3 can't shard it; give it the shape (1,), or use "
                "strategy=deepspeed_stage_2 or fsdp"
            )
    if wrapped := [name for name, module in model.named_modules() if isinstance(module, OptimizedModule)]:
        raise Refused(
            f"{listed(wrapped)} is wrapped by torch.compile, whose parameters DeepSpeed's stage 3 can't replace by "
            "shards; leave that to compile=true, or use strategy=fsdp"
        )


class ZeroPrecision(Mixin, DeepSpeedPrecision):
    """Precision plugin that does not cast inputs if DeepSpeed autocasts operations over 32-bit weights.

    The strategy sets both attributes.
    """

    autocasts = False
    steps_by_hand = False  # the module uses manual optimization

    def clip_gradients(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Do nothing: DeepSpeed's engine clips by the Trainer's value in each of its steps.

        Raises:
            Refused: a module under manual optimization clips gradients, which DeepSpeed does not expose.
        """
        if self.steps_by_hand:
            raise Refused(
                "training_step clips gradients (self.clip_gradients), but DeepSpeed does not expose gradients; use "
                "strategy=ddp or fsdp"
            )

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert the module at 16-true and bf16-true; otherwise, return it unchanged, in 32 bits.

        Lightning would also cast its buffers, and make complex ones real.
        """
        return super().convert_module(module) if self.precision in ("16-true", "bf16-true") else module

    def convert_input(self, data: Any) -> Any:
        return data if self.autocasts else super().convert_input(data)


class _CPU(_cpu_accelerator.CPU_Accelerator):  # type: ignore[misc]  # the library has no types for it
    """CPU accelerator without the shared-memory collectives, which only inference uses.

    DeepSpeed would compile test programs for a minute to find out whether it can compile that operator.
    """

    def create_op_builder(self, op_name: str) -> Any:
        return None if op_name == "ShareMemCommBuilder" else super().create_op_builder(op_name)
