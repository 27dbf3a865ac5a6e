"""The config of a transformers model, from arguments or a folder, checked for what transformers does not know."""

from __future__ import annotations

from difflib import get_close_matches
from functools import partial
from typing import Any


def read_config(folder: Any, changes: dict[str, Any]) -> Any:
    """Return the model's config: a folder's with changes, or a new one of a `model_type`."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, PretrainedConfig

    if folder is None and "model_type" not in changes:
        raise ValueError(
            "model has neither pretrained nor config; type model.pretrained=FOLDER, or the name of a hub repository"
        )
    if folder is None:
        check_type(changes["model_type"])
    from_folder = partial(AutoConfig.from_pretrained, folder, local_files_only=True, trust_remote_code=False)
    try:
        if folder is not None:  # first, because transformers would ask for code that its auto_map names
            check_type(str(PretrainedConfig.get_config_dict(folder, local_files_only=True)[0].get("model_type")))
        known = from_folder() if folder else AutoConfig.for_model(**changes)
        check_keys(known, changes)
        return from_folder(**changes) if folder else known
    except (OSError, StrictDataclassError) as error:  # the last line is about the value
        raise ValueError(f"model.config: {str(error).strip().splitlines()[-1].strip()}") from error


def check_type(model_type: str) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    if model_type not in KNOWN:
        near = get_close_matches(model_type, KNOWN, n=1)
        meant = f"; did you mean {near[0]}?" if near else ", such as gpt2, llama, qwen3"
        raise ValueError(f"model_type={model_type} is not a causal language model of transformers{meant}")


def check_keys(known: Any, changes: dict[str, Any]) -> None:
    """Raise ValueError for an unknown key that resembles a known one: a config accepts any key."""
    default = type(known)()
    for name in (name for name in changes if not hasattr(default, name)):
        if near := get_close_matches(name, {*default.to_dict(), *default.attribute_map}, n=1, cutoff=0.8):
            raise ValueError(f"model.config.{name}: {type(known).__name__} has no such key; did you mean {near[0]}?")
