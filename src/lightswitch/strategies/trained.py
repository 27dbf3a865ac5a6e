"""Which parameters are trained: a module, or a callback, may freeze and unfreeze some while a run goes on."""

from __future__ import annotations

from collections.abc import Iterator

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from torch import nn

from lightswitch.checkpoints import names
from lightswitch.errors import Refused, listed


class Trained:
    """Record of the parameters of a module that are trained.

    Args:
        module: with all its parameters. Where FSDP2 has put a gathered one in the place of a parameter, a hook freezes
            that, and it is looked at.
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
        """Return the parameters by name that are trained and were not at the last call, or the other way round.

        The first call is compared with when the record was made.
        """
        before, self._are_trained = self._are_trained, self._now()
        if self._are_trained == before:
            return {}
        both = zip(self._places.items(), before, self._are_trained, strict=True)
        return {
            name: parameter for (name, (*_, parameter)), was_trained, is_trained in both if was_trained != is_trained
        }

    def refuse_none(self, module: LightningModule) -> None:
        """Check that something is trained, where a strategy is made anew.

        Raises:
            Refused: nothing is.
        """
        if not any(self._are_trained):
            raise Refused(
                f"all parameters are frozen in step {module.global_step}; leave some trained (requires_grad=True), or "
                "end the run there by trainer.max_steps"
            )

    def refuse_changes(self, module: LightningModule) -> None:
        """Check, in a training step, that what is trained is still what the strategy was made for.

        A module that optimizes by hand freezes what the optimizer at work does not step (`toggle_optimizer`).

        Raises:
            Refused: it is not.
        """
        if module.automatic_optimization and (changed := self.changes()):
            raise Refused(
                f"requires_grad of {listed(list(changed), 'parameters')} is set within step {module.global_step}, for "
                "which gradients are already laid out; set it in on_train_batch_start, at the step's first batch"
            )

    def _now(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._there()]

    def _there(self) -> Iterator[nn.Parameter]:
        for parameters, key, parameter in self._places.values():
            there = parameters.get(key)
            yield there if isinstance(there, nn.Parameter) else parameter  # FSDP1 puts views there


class WatchedForward(_ForwardRedirection):
    """Way of a training step through a wrapper's forward pass, at the end of which parameters are still gathered.

    Args:
        trained: before the step.
    """

    def __init__(self, trained: Trained) -> None:
        self._trained = trained

    def on_after_inner_forward(self, wrapper_module: nn.Module, original_module: LightningModule) -> None:
        """Check what is trained.

        Raises:
            Refused: others than before the step.
        """
        if original_module.trainer.training:
            self._trained.refuse_changes(original_module)
