"""Any causal language model of transformers: pretrained or from a config, trained in full or with LoRA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from project.hub import check_weights, folder_of, read_tokenizer, require
from project.models.hf_adapters import Adapters, check_targets, lora_config, merged, with_lora
from project.models.hf_config import read_config
from project.models.language_model import LanguageModel
from project.optimizer import OptimizerFactory, SchedulerFactory

if TYPE_CHECKING:
    from peft import LoraConfig


class HFCausalLM(LanguageModel):
    """A transformers model with the interface of the other language models: token ids to logits.

    Args:
        context: length of the training windows, in tokens; at most the model's.
        pretrained: a folder, or the name of a hub repository in the local cache.
        config: without `pretrained`, a `model_type` and its sizes; with it, changes to its config.json.
        lora: `{r, alpha, dropout, target_modules}` and any other argument of peft's LoraConfig; all else is frozen.
        tokenizer: a folder, or the name of a hub repository, to export with the model.
        download: download files of the hub that are not in the cache.

    Raises:
        ValueError, FileNotFoundError, ModuleNotFoundError: an argument does not fit; no weights are loaded by then.
    """

    vocab_key = "model.config.vocab_size"

    def __init__(
        self,
        context: int,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None = None,
        pretrained: str | None = None,
        config: dict[str, Any] | None = None,
        lora: dict[str, Any] | None = None,
        tokenizer: str | None = None,
        download: bool = False,
        sample_tokens: int = 64,
    ) -> None:
        super().__init__(context, optimizer, scheduler, sample_tokens, samples_before=pretrained is not None)
        require("transformers", *(["peft"] if lora else []))
        self.folder = folder_of(pretrained, "model.pretrained", download) if pretrained else None
        self.tokenizer = folder_of(tokenizer, "model.tokenizer", download) if tokenizer else None
        self.config = read_config(self.folder, dict(config or {}))
        if self.folder is not None:
            check_weights(self.folder)
        self.vocab_size = self.config.get_text_config().vocab_size
        self.adapters = lora_config({"base_model_name_or_path": pretrained, **lora}) if lora else None
        longest = getattr(self.config, "max_position_embeddings", None) or context
        if context > longest:
            raise ValueError(f"context is {context}, but the model's maximum is {longest}; set model.context={longest}")
        check_fit(self.config, self.adapters)

    def configure_model(self) -> None:
        """Create the model and load its weights; on the meta device, they are not loaded, and the strategy fills them
        later."""
        if hasattr(self, "model"):
            return
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        if self.folder is None or nn.LayerNorm(1).weight.is_meta:
            model = AutoModelForCausalLM.from_config(self.config, dtype=torch.get_default_dtype())
        else:
            model = AutoModelForCausalLM.from_pretrained(
                self.folder,
                config=self.config,
                dtype=torch.get_default_dtype(),
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
            )
        self.model = (with_lora(model, self.adapters) if self.adapters else model).train()
        self.own_names = {name.replace(".base_layer.", "."): name for name, _ in self.model.named_parameters()}

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits

    def to_hf(self) -> list[Any]:
        """Return the transformers model, with its adapters merged into the weights for good, and its tokenizer."""
        return [merged(self.model), *([read_tokenizer(self.tokenizer)] if self.tokenizer else [])]

    def to_peft(self) -> list[Any]:
        """Return the adapters alone. Raises ValueError if there are none."""
        if self.adapters is None:
            raise ValueError("no adapters, as model.lora is not set; use --format hf")
        return [Adapters.of(self.model, self.adapters)]

    def from_hf(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return weights of the hub under the names of this model, in which adapted layers are nested more deeply."""
        return {f"model.{self.own_names.get(name, name)}": value for name, value in weights.items()}


def check_fit(config: Any, adapters: LoraConfig | None) -> None:
    """Build the model without weights, in a second at most, to report what does not fit before a run starts.

    Raises ValueError for invalid sizes, and for adapters of layers that the model does not have.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        if adapters is not None:
            check_targets(model, adapters)
