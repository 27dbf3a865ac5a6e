"""Parameters without values, on ranks that will be sent the values of rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.weak import WeakIdKeyDictionary


@contextmanager
def placeholders() -> Iterator[None]:
    """Let modules built in the context have parameters on the meta device, which take no memory; all else is as ever.

    Under `torch.device("meta")` plain tensors and the states of metrics would be on meta, too, and stay there.
    """
    register = nn.Module.register_parameter
    replaced = WeakIdKeyDictionary()  # a tied parameter stays tied

    def register_placeholder(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None or parameter.is_meta or isinstance(parameter, UninitializedParameter):
            register(module, name, parameter)
            return
        if parameter not in replaced:
            replaced[parameter] = _like(parameter, "meta")
        register(module, name, replaced[parameter])

    nn.Module.register_parameter = register_placeholder  # type: ignore[method-assign,assignment]  # inside of the context alone
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]  # as it was


def fill_with_nothing(module: nn.Module) -> None:
    """Turn placeholders into CPU parameters whose memory is taken only once it is written to."""
    for parameter in module.parameters():
        if parameter.is_meta:
            torch.utils.swap_tensors(parameter, _like(parameter, "cpu"))  # type: ignore[no-untyped-call]  # torch's


def _like(parameter: nn.Parameter, device: str) -> nn.Parameter:
    made = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)  # attributes that models set on their parameters
    return made
