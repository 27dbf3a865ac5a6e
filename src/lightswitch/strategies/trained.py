"""Records of the parameters that are trained, which may change during a run, and of those without a gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from lightswitch.checkpoints import names
from lightswitch.errors import Refused, listed

_COMPARED_STEPS = 3  # in which ranks compare which parameters they use


class Trained:
    """Record of which parameters of a module are trained.

    It tracks `requires_grad`; under FSDP2, that of the unsharded parameter while it stands in, because hooks set it
    there.

    Args:
        module: module with all its parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = {
            names.own_name(f"{path}.{key}" if path else key): (part._parameters, key, parameter)
            for path, part in module.named_modules()
            for key, parameter in part._parameters.items()
            if parameter is not None
        }
        self._are_trained = self._now()

    def changes(self) -> dict[str, nn.Parameter]:
        """Return, by name, the parameters that were frozen or unfrozen since the last call.

        The first call compares with the construction of the record.
        """
        before, self._are_trained = self._are_trained, self._now()
        if self._are_trained == before:
            return {}
        both = zip(self._places.items(), before, self._are_trained, strict=True)
        return {
            name: parameter for (name, (*_, parameter)), was_trained, is_trained in both if was_trained != is_trained
        }

    def refuse_none(self, module: LightningModule) -> None:
        """Check that some parameter is trained, before a strategy is set up again.

        Raises:
            Refused: all parameters are frozen.
        """
        if not any(self._are_trained):
            raise Refused(
                f"all parameters are frozen in step {module.global_step}; keep some trained (requires_grad=True), or "
                "end the run there with trainer.max_steps"
            )

    def refuse_changes(self, module: LightningModule) -> None:
        """Check, in a training step, that the trained parameters have not changed since the step began.

        Under manual optimization there is no check: `toggle_optimizer` freezes the parameters of other optimizers.

        Raises:
            Refused: the step has frozen or unfrozen a parameter.
        """
        if module.automatic_optimization and (changed := self.changes()):
            raise Refused(
                f"requires_grad of {listed(list(changed), 'parameters')} is changed within step {module.global_step}, "
                "after its gradients were set up; set it in on_train_batch_start, at the step's first batch"
            )

    def _now(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._there()]

    def _there(self) -> Iterator[nn.Parameter]:
        for parameters, key, parameter in self._places.values():
            there = parameters[key] if key in parameters else parameter  # noqa: SIM401  # scripted ones have no `get`
            yield parameter if there is None else there


class WatchedForward(_ForwardRedirection):
    """Redirection of a step through a wrapper's forward pass, with a check before the wrapper frees parameters.

    Args:
        trained: record of the parameters that were trained before the step.
    """

    def __init__(self, trained: Trained) -> None:
        self._trained = trained

    def on_after_inner_forward(self, wrapper_module: nn.Module, original_module: LightningModule) -> None:
        """Check, in training, that the step has not changed the trained parameters.

        Raises:
            Refused: it has frozen or unfrozen a parameter.
        """
        if original_module.trainer.training:
            self._trained.refuse_changes(original_module)


class UnusedParameters:
    """Record of the parameters that took no part in the loss of a step.

    Args:
        parameters: parameters by name; those that are frozen now are ignored, even if they are trained later.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self._used: set[Tensor] = set()
        self._unreached: set[str] = set()  # in the first steps, by a graph that hides them, as reentrant checkpoints do
        self._nodes: dict[str, Node] = {}  # of autograd's graph, by parameter
        self._steps = 0

    def mark_used(self, parameter: Tensor) -> None:
        """Record that a parameter has a gradient, as a hook on its gradient."""
        self._used.add(parameter)

    def of_step(self) -> list[str]:
        """Return the names of the parameters that this rank has not used since the last call."""
        unused = self._unused()
        self._used.clear()
        self._steps += 1
        return unused

    def refuse_uneven(self, pass_alone: bool) -> None:
        """Check that all ranks use the same parameters, before gradients are reduced. Collective in the first steps.

        In later steps, each rank compares with what it used in the first ones.

        Args:
            pass_alone: compare what the backward pass that has begun reaches, whatever earlier ones of the step did.

        Raises:
            Refused: a rank does not use a parameter that another one uses.
        """
        world_size = dist.get_world_size()
        if world_size == 1 or dist.get_backend() == "fake":  # a planned step's
            return
        unreached = {name for name in self._unused(pass_alone) if not self._is_reached(name)}
        if self._steps >= _COMPARED_STEPS:
            if missing := sorted(unreached - self._unreached):
                raise Refused(_uneven(missing, f"all ranks in the first steps, but not of rank {dist.get_rank()} now"))
            return
        self._unreached |= unreached
        everywhere: list[Any] = [None] * world_size
        dist.all_gather_object(everywhere, unreached)
        for rank, its in enumerate(everywhere):
            if missing := sorted(its ^ everywhere[0]):
                raise Refused(_uneven(missing, f"one of the ranks 0 and {rank}, but not of the other"))

    def _unused(self, pass_alone: bool = False) -> list[str]:
        used = set() if pass_alone else self._used
        return sorted(name for name, one in self._parameters.items() if one.requires_grad and one not in used)

    def _is_reached(self, name: str) -> bool:
        """Return whether the running backward pass, if there is one, will compute a parameter's gradient."""
        if torch._C._current_graph_task_id() == -1:
            return False
        if name not in self._nodes:  # finding one takes longer than asking for it
            self._nodes[name] = get_gradient_edge(self._parameters[name]).node
        return torch._C._will_engine_execute_node(self._nodes[name])


def _uneven(names: Sequence[str], where: str) -> str:
    return (
        f"{listed(names, 'parameters')} took part in the loss of {where}, and DeepSpeed reduces the gradients of all "
        "ranks together; use the same parameters on each rank, or strategy=ddp with "
        "trainer.strategy.find_unused_parameters=true"
    )
