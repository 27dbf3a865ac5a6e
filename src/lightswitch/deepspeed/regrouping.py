"""Rebuilding of a live DeepSpeed engine when the trained parameters or their groups change."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightswitch import patches
from lightswitch.checkpoints import names
from lightswitch.checkpoints.shards import Piece, Stored, local, with_local
from lightswitch.deepspeed.quiet_import import deepspeed
from lightswitch.deepspeed.state import PortableDeepSpeed, States, pieces, scatter_states, scatter_weights
from lightswitch.deepspeed.writes import EngineWrites
from lightswitch.errors import Refused
from lightswitch.strategies.known_callbacks import is_on_nvme, resharded
from lightswitch.strategies.trained import Trained, Unused
from lightswitch.strategies.units import is_compiled
from lightswitch.strategies.writes import CarriesWrites


class Regrouping(CarriesWrites, PortableDeepSpeed, DeepSpeedStrategy):
    """Strategy that rebuilds DeepSpeed's engine over the trained parameters, and carries over weights and states."""

    _trained: Trained
    _unused: Unused
    _writes: EngineWrites | None = None
    _hooks: Sequence[RemovableHandle] = ()

    def _setup_model_and_optimizer(
        self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[deepspeed.DeepSpeedEngine, Optimizer]:
        """Make DeepSpeed's engine over the trained parameters, and record those without a gradient. Collective."""
        if optimizer is None:  # nothing is trained
            made: tuple[deepspeed.DeepSpeedEngine, Optimizer] = super()._setup_model_and_optimizer(model, optimizer)
            self._watch_writes(made[0], model, self.broadcast(secrets.token_hex(8)))
            return made
        with _trained_groups(model, optimizer, self.zero_stage_3):
            engine, stepped = super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)
        if engine.managed_gradient_accumulation():
            engine.set_gradient_accumulation_boundary(True)  # the engine must not count micro-batches
        else:  # manual optimization: a module may also step without Lightning's wrapper
            patches.replace(stepped, "step", partial(self._step, engine, stepped.step))
        self._trained, in_groups = Trained(model), {name for group in self._group_names for name in group}
        parameters = {name: one for name, one in names.parameters(model).items() if name in in_groups}
        key = self.broadcast(secrets.token_hex(8))
        self._unused = Unused(parameters, self._patience_seconds, key)
        self._watch_writes(engine, model, key)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._unused.mark_used)  # type: ignore[no-untyped-call]  # untyped in torch
            for parameter in parameters.values()
            if parameter.requires_grad
        ]
        return engine, stepped

    @property
    def _patience_seconds(self) -> float:
        return (self._timeout or default_pg_timeout).total_seconds()

    def _watch_writes(self, engine: deepspeed.DeepSpeedEngine, model: nn.Module, key: str) -> None:
        """Give the module's hooks and steps access to whole weights; with NVMe offload, refuse them."""
        is_whole = "training_step" not in vars(model) and not any(map(is_compiled, model.modules()))
        self._writes = EngineWrites(engine, model, self.looks, is_whole, key, self._patience_seconds, is_on_nvme(self))

    def _step(self, engine: Any, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Step DeepSpeed's engine instead of its optimizer, unless the engine is calling."""
        if engine._running_engine_step:
            return step(*args, **kwargs)
        with self.outside_of_hooks():
            return engine.step()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Rebuild the engine if the trained parameters have changed, only in the first micro-batch of a step: the
        engine holds the gradients of earlier ones."""
        super().on_train_batch_start(batch, batch_idx)
        assert self.lightning_module is not None
        is_first = batch_idx % self.lightning_module.trainer.accumulate_grad_batches == 0
        if is_first and self._trained.changes():
            self._trained.refuse_none(self.lightning_module)
            self._regroup(self.optimizers[0].optimizer)  # type: ignore[attr-defined]  # DeepSpeed's

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Check that the trained parameters are those that the engine has hooks on, and the same ones on all ranks.

        Raises:
            Refused: the training step changed `requires_grad` of some, or not all ranks use the same ones.
        """
        super().pre_backward(closure_loss)
        assert self.lightning_module is not None
        self._trained.refuse_changes(self.lightning_module)
        engine, unused = self.model, self._unused
        assert isinstance(engine, deepspeed.DeepSpeedEngine)
        in_each_pass = engine.zero_optimization_stage() > 1
        if closure_loss.requires_grad and (in_each_pass or engine.is_gradient_accumulation_boundary()):
            closure_loss.register_hook(lambda _: unused.refuse_uneven(in_each_pass))  # type: ignore[no-untyped-call]

    @contextmanager
    def over_parameters(self) -> Iterator[None]:
        """Context in which the optimizer's groups hold the module's parameters; at its end, the engine is rebuilt if
        groups or trained parameters have changed. Collective."""
        zero, before = self.optimizers[0], self._group_names
        flat = [group["params"] for group in zero.param_groups]
        optimizer: Optimizer = zero.optimizer  # type: ignore[attr-defined]  # DeepSpeed's
        self._give_back(optimizer)
        self.optimizers = [optimizer]
        yield  # no try/finally: an error ends the run
        self.remember_groups(optimizer)
        self.optimizers = [zero]
        added = optimizer.param_groups[len(flat) :]
        del optimizer.param_groups[len(flat) :]  # the current engine does not have them
        for group, parameters in zip(optimizer.param_groups, flat, strict=True):
            group["params"] = parameters
        if self._group_names != before or self._trained.changes():
            self._regroup(optimizer, added)

    def _give_back(self, optimizer: Optimizer) -> None:
        """Replace DeepSpeed's flat parameters in an optimizer's groups with the module's parameters."""
        assert self.lightning_module is not None
        parameters = names.parameters(self.lightning_module)
        for group, named in zip(optimizer.param_groups, self._group_names, strict=True):
            group["params"] = [parameters[name] for name in named]

    def _regroup(self, optimizer: Optimizer, added: Sequence[dict[str, Any]] = ()) -> None:
        """Rebuild the engine, and carry over weights, states and averages. Collective.

        Args:
            optimizer: the optimizer that DeepSpeed steps.
            added: groups to add to it.

        Raises:
            Refused: part of the state is on NVMe, or does not fit the new groups.
        """
        module, engine = self.lightning_module, self.model
        assert module is not None
        if is_on_nvme(self):
            raise Refused(
                "state that DeepSpeed offloads to NVMe can't be re-sharded when other parameters are trained; use "
                "strategy=fsdp"
            )
        with resharded(module, lambda kept: _whole(kept, self.root_device)):
            state = _State.of(engine, module)
            self.release_engine()
            patches.replace(engine, "optimizer", None)  # otherwise the engine releases it again when it is collected
            optimizer.state.clear()
            optimizer.param_groups.extend(added)
            self._give_back(optimizer)
            self.model, stepped = self._setup_model_and_optimizer(module, optimizer)
            self.optimizers = [stepped]
            self._idle = state.put_into(self.model, module, self._idle, self.root_device)

    def release_engine(self) -> None:
        """Destroy DeepSpeed's engine and remove its hooks, which would run beside those of the next engine."""
        engine, self._writes = self.model, None
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


@dataclass(frozen=True)
class _State:
    """An engine's weights and optimizer state on this rank.

    Args:
        weights: shards by parameter name; weights that every device holds whole are left out.
        states: optimizer states by parameter name.
        loss_scaler: DeepSpeed's loss scaler.
        steps: steps of the run so far.
    """

    weights: Mapping[str, Stored]
    states: Mapping[str, Mapping[str, Stored]]
    loss_scaler: Any
    steps: int

    @classmethod
    def of(cls, engine: Any, module: nn.Module) -> _State:
        found = list(pieces(engine, module))
        return cls(
            weights={name: _copy(weight) for name, weight, _ in found if isinstance(weight, Piece)},
            states={name: {key: _copy(value) for key, value in state.items()} for name, _, state in found},
            loss_scaler=engine.optimizer.loss_scaler,
            steps=engine.global_steps,
        )

    def put_into(self, engine: Any, module: nn.Module, idle: States, device: torch.device) -> States:
        """Copy weights and state into an engine. Collective.

        Args:
            idle: whole states of parameters that were not trained before.
            device: device for communication.

        Returns:
            The whole states of parameters that are not trained now.
        """

        def weight(name: str) -> Tensor | None:
            return _whole(self.weights[name], device) if name in self.weights else None

        def state(name: str) -> Mapping[str, Tensor]:
            return idle.get(name) or {key: _whole(value, device) for key, value in self.states[name].items()}

        scatter_weights(engine, module, weight)
        scatter_states(engine, module, state)
        patches.replace(engine.optimizer, "loss_scaler", self.loss_scaler)
        patches.replace(engine, "global_steps", self.steps)
        frozen = [name for name, parameter in names.parameters(module).items() if not parameter.requires_grad]
        whole = {name: {key: value.cpu() for key, value in state(name).items()} for name in frozen}
        return {name: values for name, values in whole.items() if values}


def _copy(kept: Stored) -> Stored:
    return with_local(kept, local(kept).detach().to("cpu", copy=True))


def _whole(kept: Stored, device: torch.device) -> Tensor:
    """Return the whole tensor of a shard, on every rank. Collective."""
    if not isinstance(kept, Piece):
        return kept
    whole = torch.zeros(kept.shape, dtype=kept.values.dtype, device=device)
    kept.of(whole).copy_(kept.values)
    dist.all_reduce(whole.view(torch.uint8) if whole.dtype == torch.bool else whole)
    return whole
