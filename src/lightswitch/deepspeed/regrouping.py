"""A live DeepSpeed engine made anew, as its parameters' groups change."""

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
from lightswitch.strategies.known_callbacks import is_on_nvme, laid_out_anew
from lightswitch.strategies.trained import Trained, Unused
from lightswitch.strategies.units import is_compiled
from lightswitch.strategies.writes import CarriesWrites


class Regrouping(CarriesWrites, PortableDeepSpeed, DeepSpeedStrategy):
    """Strategy that makes DeepSpeed's engine anew over what is trained, with the weights and states that it has."""

    _trained: Trained
    _unused: Unused
    _writes: EngineWrites | None = None
    _hooks: Sequence[RemovableHandle] = ()

    def _setup_model_and_optimizer(
        self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[deepspeed.DeepSpeedEngine, Optimizer]:
        """Make DeepSpeed's engine, which steps what is trained, and watch that it is used. Collective."""
        if optimizer is None:  # nothing is trained
            made: tuple[deepspeed.DeepSpeedEngine, Optimizer] = super()._setup_model_and_optimizer(model, optimizer)
            self._watch_writes(made[0], model, self.broadcast(secrets.token_hex(8)))
            return made
        with _trained_groups(model, optimizer, self.zero_stage_3):
            engine, stepped = super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)
        if engine.managed_gradient_accumulation():
            engine.set_gradient_accumulation_boundary(True)  # and not by the engine's own count of micro batches
        else:  # by hand: also where a module steps past Lightning's wrapper
            patches.replace(stepped, "step", partial(self._step, engine, stepped.step))
        self._trained, parameters = Trained(model), names.parameters(model)
        key = self.broadcast(secrets.token_hex(8))
        self._unused = Unused(parameters, self._patience_seconds, key)
        self._watch_writes(engine, model, key)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._unused.mark_used)  # type: ignore[no-untyped-call]  # torch's
            for parameter in parameters.values()
            if parameter.requires_grad
        ]
        return engine, stepped

    @property
    def _patience_seconds(self) -> float:
        return (self._timeout or default_pg_timeout).total_seconds()

    def _watch_writes(self, engine: deepspeed.DeepSpeedEngine, model: nn.Module, key: str) -> None:
        """Have weights at hand where the module's hooks and steps touch them."""
        if not is_on_nvme(self):
            is_whole = "training_step" not in vars(model) and not any(map(is_compiled, model.modules()))
            self._writes = EngineWrites(engine, model, self.looks, is_whole, key, self._patience_seconds)

    def _step(self, engine: Any, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Step by DeepSpeed's engine, which does more than its optimizer."""
        if engine._running_engine_step:
            return step(*args, **kwargs)
        with self.outside_of_hooks():
            return engine.step()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Follow what is trained, at the beginning of a step: the engine has gradients of those before it."""
        super().on_train_batch_start(batch, batch_idx)
        assert self.lightning_module is not None
        is_first = batch_idx % self.lightning_module.trainer.accumulate_grad_batches == 0
        if is_first and self._trained.changes():
            self._trained.refuse_none(self.lightning_module)
            self._regroup(self.optimizers[0].optimizer)  # type: ignore[attr-defined]  # DeepSpeed's

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Check that what is trained is what the engine has hooks on.

        Raises:
            Refused: it is not.
        """
        super().pre_backward(closure_loss)
        assert self.lightning_module is not None
        self._trained.refuse_changes(self.lightning_module)

    @contextmanager
    def over_parameters(self) -> Iterator[None]:
        """Context in which the groups have the parameters themselves; afterwards the engine follows. Collective."""
        zero, before = self.optimizers[0], self._group_names
        flat = [group["params"] for group in zero.param_groups]
        optimizer: Optimizer = zero.optimizer  # type: ignore[attr-defined]  # DeepSpeed's
        self._give_back(optimizer)
        self.optimizers = [optimizer]
        yield  # after an error the run ends
        self.remember_groups(optimizer)
        self.optimizers = [zero]
        added = optimizer.param_groups[len(flat) :]
        del optimizer.param_groups[len(flat) :]  # which DeepSpeed does not know
        for group, parameters in zip(optimizer.param_groups, flat, strict=True):
            group["params"] = parameters
        if self._group_names != before or self._trained.changes():
            self._regroup(optimizer, added)

    def _give_back(self, optimizer: Optimizer) -> None:
        """Put the parameters into an optimizer's groups again, in place of DeepSpeed's flat ones."""
        assert self.lightning_module is not None
        parameters = names.parameters(self.lightning_module)
        for group, named in zip(optimizer.param_groups, self._group_names, strict=True):
            group["params"] = [parameters[name] for name in named]

    def _regroup(self, optimizer: Optimizer, added: Sequence[dict[str, Any]] = ()) -> None:
        """Make the engine anew, and let weights, states and averages go on in it. Collective.

        Args:
            optimizer: that DeepSpeed steps.
            added: groups that it is given.

        Raises:
            Refused: a part of the state is not in memory, or can't go on in the new groups.
        """
        module, engine = self.lightning_module, self.model
        assert module is not None
        if is_on_nvme(self):
            raise Refused(
                "what DeepSpeed keeps on NVMe can't be laid out anew as other parameters are trained; use strategy=fsdp"
            )
        with laid_out_anew(module, lambda kept: _whole(kept, self.root_device)):
            state = _State.of(engine, module)
            self.release_engine()
            patches.replace(engine, "optimizer", None)  # or it is released once more when the engine is collected
            optimizer.state.clear()
            optimizer.param_groups.extend(added)
            self._give_back(optimizer)
            self.model, stepped = self._setup_model_and_optimizer(module, optimizer)
            self.optimizers = [stepped]
            self._idle = state.put_into(self.model, module, self._idle, self.root_device)

    def release_engine(self) -> None:
        """Take DeepSpeed's engine out of the process: its hooks would run beside those of the next."""
        engine, self._writes = self.model, None
        if not isinstance(engine, deepspeed.DeepSpeedEngine):
            return
        if self.zero_stage_3:
            for parameter in engine.module.parameters():
                parameter.ds_active_sub_modules.clear()  # an error has ended a forward pass
                if parameter.numel():  # small ones are kept whole on the device, and would be taken for it on the CPU
                    parameter.partition()
        for hook in self._hooks:
            hook.remove()
        engine.module_forward_pre_hook.remove()
        engine.module_forward_post_hook.remove()
        engine.destroy()


@contextmanager
def _trained_groups(module: nn.Module, optimizer: Optimizer, zero_3: bool) -> Iterator[None]:
    """Leave in an optimizer's groups what is trained, as DeepSpeed steps nothing else.

    A group of which nothing is trained keeps its place by a parameter that is used nowhere, as schedules count groups:
    DeepSpeed fails for such a group at stages 1 and 2 (0.19), where it also asks for the name of each parameter.
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
    """Weights and optimizer state that an engine has on this rank.

    Args:
        weights: by parameter; those that every device holds whole stay where they are.
        states: by parameter.
        loss_scaler: DeepSpeed's.
        steps: of the run.
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
        """Let an engine go on from here. Collective.

        Args:
            idle: states of parameters that were not trained.
            device: on which ranks send each other parts.

        Returns:
            The states of those that are not trained now.
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
    """Return a tensor of which each rank keeps a piece, on every rank. Collective."""
    if not isinstance(kept, Piece):
        return kept
    whole = torch.zeros(kept.shape, dtype=kept.values.dtype, device=device)
    kept.of(whole).copy_(kept.values)
    dist.all_reduce(whole)
    return whole
