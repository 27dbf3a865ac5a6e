"""Parameters without values, on ranks that will be sent the values of rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import UninitializedParameter
from torch.utils.weak import WeakIdKeyDictionary


@contextmanager
def placeholders() -> Iterator[None]:
    """Let modules built in the context have parameters on the meta device, which take no memory; all else is as ever.

    Under `torch.device("meta")` plain tensors and the states of metrics would be on meta, too, and stay there.
    """
    replaced = WeakIdKeyDictionary()  # a tied parameter stays tied

    def placeholder(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta or isinstance(parameter, UninitializedParameter):
            return None
        if parameter not in replaced:
            replaced[parameter] = _like(parameter, "meta")
        return cast(nn.Parameter, replaced[parameter])

    hook = register_module_parameter_registration_hook(placeholder)  # type: ignore[arg-type]  # it may return one
    try:
        yield
    finally:
        hook.remove()


def fill_with_nothing(module: nn.Module) -> None:
    """Turn placeholders into CPU parameters whose memory is taken only once it is written to."""
    for parameter in module.parameters():
        if parameter.is_meta:
            torch.utils.swap_tensors(parameter, _like(parameter, "cpu"))  # type: ignore[no-untyped-call]  # torch's


def _like(parameter: nn.Parameter, device: str) -> nn.Parameter:
    made = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)  # attributes that models set on their parameters
    return made
