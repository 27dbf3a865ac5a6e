"""LoRA adapters of peft in the layers of a transformers model; all other parameters are frozen."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

if TYPE_CHECKING:
    from peft import LoraConfig


def lora_config(lora: dict[str, Any]) -> LoraConfig:
    """Return peft's config; `alpha` and `dropout` stand for lora_alpha and lora_dropout."""
    from peft import LoraConfig

    short = {"alpha": "lora_alpha", "dropout": "lora_dropout"}
    try:
        config = LoraConfig(**{short.get(name, name): value for name, value in lora.items()})
    except TypeError as error:
        raise ValueError(f"model.lora: {error}; expected r, alpha, dropout, target_modules") from error
    if not isinstance(config.r, int) or config.r < 1:
        raise ValueError(f"model.lora.r={config.r}: expected a whole number from 1, the rank of the adapters")
    return config


def check_targets(model: nn.Module, config: LoraConfig) -> None:
    """Put the adapters into a model. Raises ValueError for target layers that the model does not have."""
    listed = config.target_modules if not isinstance(config.target_modules, str) else None  # a str is a pattern
    absent = [target for target in sorted(listed or ()) if not has_layer(model, target)]
    if absent:
        there = sorted({name.rpartition(".")[2] for name in adaptable(model)})
        raise ValueError(
            f"model.lora.target_modules: {type(model).__name__} has no {', '.join(absent)}; it has {', '.join(there)}"
        )
    try:
        with_lora(model, deepcopy(config))  # peft completes the config for the model
    except (TypeError, ValueError) as error:
        raise ValueError(f"model.lora: {str(error).splitlines()[0]}") from error


def has_layer(model: nn.Module, target: str) -> bool:
    return any(f".{name}".endswith(f".{target}") for name, _ in model.named_modules())


def adaptable(model: nn.Module) -> Iterator[str]:
    """Yield the paths of layers with a matrix: linear layers, and those of GPT-2, which are transposed."""
    for name, part in model.named_modules():
        if getattr(getattr(part, "weight", None), "ndim", 0) == 2 and not isinstance(part, nn.Embedding):
            yield name


def with_lora(model: nn.Module, config: LoraConfig) -> nn.Module:
    """Return the model with low-rank adapters in its layers and all else frozen (Hu et al. 2021, arXiv:2106.09685)."""
    from peft import inject_adapter_in_model

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")  # peft sets it for GPT-2's layers
        adapted: nn.Module = inject_adapter_in_model(config, model)
    return adapted


def merged(model: nn.Module) -> nn.Module:
    """Return the model with its adapters added to the weights, and without peft's layers."""
    for path, part in [*model.named_modules()]:
        if hasattr(part, "lora_A"):
            part.merge()
            model.set_submodule(path, part.get_base_layer())
    return model


@dataclass
class Adapters:
    """Adapters without their model, in a folder that peft's PeftModel.from_pretrained reads."""

    config: LoraConfig
    weights: dict[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, config: LoraConfig) -> Adapters:
        """Return a model's adapters under the names that peft gives them in a file."""
        held = {name: value for name, value in model.state_dict().items() if ".lora_" in name}
        pattern = r"(?<=lora_magnitude_vector)\.default\.weight$|\.default(?=\.|$)"
        return cls(config, {f"base_model.model.{re.sub(pattern, '', name)}": value for name, value in held.items()})

    @classmethod
    def from_pretrained(cls, folder: Path, **_: Any) -> Adapters:
        from peft import LoraConfig

        return cls(LoraConfig.from_pretrained(folder), load_file(folder / "adapter_model.safetensors"))

    def save_pretrained(self, folder: Path, **_: Any) -> None:
        """Write adapter_config.json and adapter_model.safetensors."""
        self.config.save_pretrained(str(folder))
        save_file(self.weights, folder / "adapter_model.safetensors")

    def state_dict(self) -> dict[str, Tensor]:
        return self.weights

    def to(self, dtype: torch.dtype) -> None:
        self.weights = {name: value.to(dtype) for name, value in self.weights.items()}
