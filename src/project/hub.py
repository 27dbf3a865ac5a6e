"""Folders of pretrained models and tokenizers, on disk or in the cache of the Hugging Face hub."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]  # no pickles, which would run code


def require(*packages: str) -> None:
    """Raise ModuleNotFoundError if one of the packages, which the extra `hf` installs, is missing."""
    for package in packages:
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"{package} is not installed; type pip install -e '.[hf]'")


def folder_of(name: str, key: str, download: bool = False, asking: str = "model.download=true") -> Path:
    """Return the folder `name`, or the folder of the hub repository of that name in the local cache.

    Args:
        key: key of the config, for the error message.
        download: whether to download files that are not in the cache.
        asking: the override that turns downloads on, for the error message.

    Raises:
        FileNotFoundError: there is neither, or the download failed.
        ValueError: the folder contains a pipe or a device, which would block a reader.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        for path in folder.iterdir():
            if path.exists() and not path.is_file() and not path.is_dir():
                raise ValueError(f"{key}={name}: {path.name} is a pipe or a device, expected files; remove it")
        return folder
    from huggingface_hub import constants, snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=not download, allow_patterns=_FILES))
    except (OSError, ValueError) as error:  # not in the cache, offline, or not a repository's name
        tried = f"it could not be downloaded ({str(error).splitlines()[0]})" if download else "downloads are off"
        raise FileNotFoundError(
            f"{key}={name}: there is no such folder, {constants.HF_HUB_CACHE} has no model of that name, and {tried}; "
            f"name a folder{'' if download else f', or type {asking}'}"
        ) from error


def check_weights(folder: Path) -> None:
    """Raise ValueError if a folder has no safetensors of a model that can be read; only their headers are read."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    try:
        files = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
        if outside := [file for file in files if Path(file).name != file]:
            raise ValueError(f"its index names a file outside of it, {outside[0]}")
        for file in sorted(files):
            with safe_open(folder / file, "pt"):
                pass
    except FileNotFoundError as error:
        raise ValueError(
            f"model.pretrained: {folder} has no {file}; expected safetensors of save_pretrained, no pickles"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise ValueError(f"model.pretrained: {folder} has weights that can't be read: {error}") from error


def read_tokenizer(folder: Path) -> Any:
    """Return the tokenizer in a folder. Raises ValueError if there is none that can be read."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"tokenizer: {folder} has no readable tokenizer; {str(error).splitlines()[0]}") from error
