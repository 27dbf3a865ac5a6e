"""DeepSpeed's ZeRO, on GPUs and, without compiling anything, on CPUs."""

from __future__ import annotations

import copy
import logging
import secrets
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, Precision
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from lightswitch import patches
from lightswitch.batches.callback import GlobalBatch
from lightswitch.checkpoints import names
from lightswitch.deepspeed import config as zero_config
from lightswitch.deepspeed.checkpoints import PortableDeepSpeed
from lightswitch.deepspeed.quiet_import import cpu_accelerator, deepspeed
from lightswitch.errors import Refused, listed
from lightswitch.strategies.compilation import is_compiled
from lightswitch.strategies.fused import fuse
from lightswitch.strategies.placeholders import fill_with_nothing, placeholders
from lightswitch.strategies.rank_0 import broadcast_in_place
from lightswitch.strategies.timeouts import set_timeouts
from lightswitch.strategies.unused import Unused

# DeepSpeed 0.19 calls collectives by the names they had before torch 2.13
warnings.filterwarnings("ignore", r"`torch.distributed.\w+_tensor` is deprecated", FutureWarning)

log = logging.getLogger(__name__)


class DeepSpeed(PortableDeepSpeed, DeepSpeedStrategy):
    """ZeRO by DeepSpeed for unmodified models, with the arguments of Lightning's DeepSpeedStrategy.

    The model is built on the CPU with the values it has in one process. At stage 3 it is then brought to the device and
    partitioned parameter by parameter, so that no device holds it whole; what `configure_model` builds is held whole by
    one process alone. ``config`` is a file of DeepSpeed's own; "auto" in it is taken from the run.
    """

    # Configuration

    def _load_config(self, config: Any) -> dict[str, Any] | None:
        """Return a copy of the config, as Lightning writes into it; never one that an environment variable names."""
        return zero_config.read(config) if isinstance(config, str | Path) else copy.deepcopy(config)

    def _format_config(self) -> None:
        assert self.config is not None
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set past Lightning's declaration
        plan = next((callback.plan for callback in callbacks if isinstance(callback, GlobalBatch)), None)
        run = zero_config.Run(
            precision=str(trainer.precision),
            micro_batch=plan.micro_batch if plan else 1,
            accumulation=trainer.accumulate_grad_batches,
            replicas=self.world_size,
            clip_norm=float(trainer.gradient_clip_val or 0),
        )
        given, self.config = self.config, zero_config.resolved(self.config, run)
        if self.config.get("fp16", {}).get("enabled"):
            self.config["fp16"] = {**self._loss_scaling, **self.config["fp16"]}
        if self.global_rank == 0:
            for line in zero_config.differences(given, self.config, run.precision):
                log.warning("%s", line)
        if isinstance(self.precision_plugin, _Precision):
            self.precision_plugin.autocasts = "torch_autocast" in self.config

    @property
    def _loss_scaling(self) -> dict[str, float]:
        names = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
        return {name: getattr(self, name) for name in names}

    @property
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if isinstance(plugin, DeepSpeedPrecision) and not isinstance(plugin, _Precision):
            plugin = _Precision(plugin.precision)  # type: ignore[arg-type]  # declared wider than what it takes
        self._precision_plugin = plugin

    # Processes

    @property
    def root_device(self) -> torch.device:
        device = super().root_device
        return torch.device("cpu", 0) if device.type == "cpu" else device  # DeepSpeed asks for an index

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
        with self.precision_plugin.tensor_init_context():  # not on the device, which draws other random numbers
            yield

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Build placeholders on ranks other than 0, at stage 3.

        Not by `deepspeed.zero.Init`: under it, what a module does to its children's parameters is lost, or fails.
        """
        self._init_config_if_needed()
        assert self.lightning_module is not None
        with placeholders() if self.zero_stage_3 and self.global_rank > 0 else nullcontext():
            yield
        fill_with_nothing(self.lightning_module)

    def _init_optimizers(self) -> tuple[Optimizer, LRSchedulerConfig | None]:
        """Make the optimizer before the parameters are partitioned: `configure_optimizers` may look at their shapes.

        Raises:
            Refused: there is not one optimizer.
        """
        assert self.lightning_module is not None
        optimizers, schedulers = _init_optimizers_and_lr_schedulers(self.lightning_module)
        if len(optimizers) != 1 or len(schedulers) > 1:
            raise Refused(
                f"DeepSpeed steps one optimizer with at most one scheduler, and configure_optimizers of "
                f"{type(self.lightning_module).__name__} returns {len(optimizers)} and {len(schedulers)}; "
                "use strategy=ddp"
            )
        casts = str(self.lightning_module.trainer.precision) in ("16-true", "bf16-true")
        _refuse_other_dtypes(self.lightning_module, None if casts else torch.float32)
        fuse(optimizers[0])  # before DeepSpeed makes its states
        self.remember_groups(optimizers[0])
        _let_compiled_modules_hold_parameters()
        self._place(self.lightning_module)
        parameters = names.parameters(self.lightning_module)
        key = self.broadcast(secrets.token_hex(8))
        self._unused = Unused(parameters, (self._timeout or default_pg_timeout).total_seconds(), key)
        for parameter in parameters.values():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._unused.mark_used)  # type: ignore[no-untyped-call]  # torch's
        # the weights are broadcast already, and DeepSpeed 0.19 fails for a scalar parameter
        patches.replace(deepspeed.DeepSpeedEngine, "_broadcast_model", lambda engine: None)
        return optimizers[0], schedulers[0] if schedulers else None

    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        if self.zero_stage_3:
            _refuse_other_dtypes(model, None)
        self._place(model)
        if self.zero_stage_3:
            model, _ = self._setup_model_and_optimizer(model, None)
        self.model = model

    def _place(self, model: nn.Module | None) -> None:
        """Broadcast rank 0's weights and buffers to each device; at stage 3 keep a part of each parameter."""
        assert model is not None
        assert self.config is not None
        if self.zero_stage_3:
            _refuse_empty(model)
            _gather_whole(filter(is_compiled, model.modules()))
            _Partitioned(module=model, config_dict_or_path=self.config)
            model.to(self.root_device)  # buffers and metrics
        else:
            for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
                if self.config.get(name, {}).get("enabled"):
                    _cast(model.parameters(), dtype)
            model.to(self.root_device)
            for parameter in model.parameters():
                broadcast_in_place([parameter])
        self._share_buffers()

    def _share_buffers(self) -> None:
        """Broadcast rank 0's buffers, as under DDP: the statistics of batch norms differ by rank."""
        assert self.lightning_module is not None
        broadcast_in_place(self.lightning_module.buffers())

    def on_validation_start(self) -> None:
        self._share_buffers()

    def on_test_start(self) -> None:
        self._share_buffers()

    def on_predict_start(self) -> None:
        self._share_buffers()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Step, after checking that each parameter has a gradient.

        Raises:
            Refused: a parameter took no part in the loss, and DeepSpeed, which steps groups, can leave none out.
        """

        def closure_of_all() -> Any:
            output = closure()
            assert self.lightning_module is not None
            if self._is_boundary and (unused := list(self._unused.of_step())):
                raise Refused(
                    f"{listed(unused, 'parameters')} took no part in the loss of step "
                    f"{self.lightning_module.global_step}, and DeepSpeed also updates what has no gradient; "
                    "freeze what is not used (requires_grad=False), or use strategy=fsdp"
                )
            return output

        return super().optimizer_step(optimizer, closure_of_all, *args, **kwargs)

    @property
    def _is_boundary(self) -> bool:
        """Whether this is the last micro batch of a step."""
        return isinstance(self.model, deepspeed.DeepSpeedEngine) and self.model.is_gradient_accumulation_boundary()

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run backward without dividing the loss once more: Lightning has divided it by the accumulation."""
        return super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **kwargs)

    def teardown(self) -> None:
        engine = self.model if isinstance(self.model, deepspeed.DeepSpeedEngine) else None
        if engine is not None and self.zero_stage_3:
            for parameter in engine.module.parameters():
                parameter.ds_active_sub_modules.clear()  # an error has ended a forward pass
                if parameter.numel():  # small ones are kept whole on the device, and would be taken for it on the CPU
                    parameter.partition()
        super().teardown()
        self.release_engine()

    def release_engine(self) -> None:
        """Take DeepSpeed's engine out of the process: its hooks would run beside those of the next."""
        if isinstance(self.model, deepspeed.DeepSpeedEngine):
            self.model.module_forward_pre_hook.remove()
            self.model.module_forward_post_hook.remove()
            self.model.destroy()


def _refuse_other_dtypes(model: nn.Module, kept_in: torch.dtype | None) -> None:
    """Refuse parameters that can't be flattened with the others.

    Raises:
        Refused: one is complex, or of another dtype.
    """
    for name, parameter in names.parameters(model).items():
        kept_in = kept_in or parameter.dtype
        if parameter.dtype != kept_in or parameter.is_complex():
            raise Refused(
                f"{name} is of {parameter.dtype}, and DeepSpeed keeps all parameters in one real dtype; "
                "use strategy=fsdp or ddp"
            )


def _refuse_empty(model: nn.Module) -> None:
    """Refuse parameters without elements, for which DeepSpeed fails as soon as it gathers them (0.19).

    Raises:
        Refused: there is one.
    """
    for name, parameter in names.parameters(model).items():
        if parameter.numel() == 0 and not hasattr(parameter, "ds_id"):
            raise Refused(f"{name} has no elements, which stage 3 can't gather; use strategy=deepspeed_stage_2 or fsdp")


def _gather_whole(units: Iterable[nn.Module]) -> None:
    """Let each unit be gathered at once, and not module by module: its graph would break at each of their hooks."""
    for unit in units:
        deepspeed.utils.set_z3_leaf_module(unit, True)


def _cast(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Cast weights alone; buffers stay as they are."""
    for parameter in parameters:
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def _let_compiled_modules_hold_parameters() -> None:
    """Let a module that torch.compile has wrapped have its own mapping of parameters.

    It hands attributes on to the module inside. At stage 3, where DeepSpeed gives each module a mapping of its own, the
    inner one would get that of the outer one, which is empty.
    """
    attributes = OptimizedModule._opt_mod_attributes | {"_parameters"}
    patches.replace(OptimizedModule, "_opt_mod_attributes", attributes)


class _CPU(cpu_accelerator.CPU_Accelerator):  # type: ignore[misc]  # untyped
    """Knows of no collective through shared memory, which inference alone uses.

    DeepSpeed would compile programs for a minute to see whether it can compile that one.
    """

    def create_op_builder(self, op_name: str) -> Any:
        return None if op_name == "ShareMemCommBuilder" else super().create_op_builder(op_name)


class _Partitioned(deepspeed.zero.Init):  # type: ignore[misc]  # untyped
    def _zero_init_param(self, param: nn.Parameter) -> None:
        """Partition a parameter as DeepSpeed does, which fails for one that is a scalar (0.19)."""
        _cast([param], self.dtype)
        self._convert_to_deepspeed_param(param)
        broadcast_in_place([param])
        param.partition()  # type: ignore[attr-defined]  # DeepSpeed puts it there


class _Precision(DeepSpeedPrecision):
    """Precision that leaves inputs as they are where weights are in 32 bits and DeepSpeed casts each operation."""

    autocasts = False

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return the module as it is, in 32 bits.

        Lightning would cast its buffers as well, and make complex ones real.
        """
        return super().convert_module(module) if self.precision in ("16-true", "bf16-true") else module

    def convert_input(self, data: Any) -> Any:
        return data if self.autocasts else super().convert_input(data)
