"""Folders of pretrained models and tokenizers: one on disk, or one of the Hugging Face hub's in the cache."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]  # no pickles, which would run code


def require(*packages: str) -> None:
    """Raise ModuleNotFoundError where one of the extra's packages is not installed."""
    for package in packages:
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"{package} is not installed; type pip install -e '.[hf]'")


def folder_of(name: str, key: str, download: bool = False, asking: str = "model.download=true") -> Path:
    """The folder `name`, or the hub's repository of that name in the local cache, which is filled only if asked.

    Args:
        key: of the config, for the message.
        download: fetch what the cache has not.
        asking: what is typed to download, for the message.

    Raises:
        FileNotFoundError: there is neither, or the download failed.
        ValueError: it holds a pipe or a device, for which a reader would wait.
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
    except (OSError, ValueError) as error:  # not in the cache, offline, or no name of a repository
        tried = f"it could not be downloaded ({str(error).splitlines()[0]})" if download else "nothing is downloaded"
        raise FileNotFoundError(
            f"{key}={name}: there is no such folder, {constants.HF_HUB_CACHE} has no model of that name, and {tried}; "
            f"name a folder{'' if download else f', or type {asking}'}"
        ) from error


def check_weights(folder: Path) -> None:
    """Raise ValueError where a folder has no safetensors of a model, or some that can't be read: headers alone are."""
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
            f"model.pretrained: {folder} has no {file}; expected what save_pretrained writes, and no pickles"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise ValueError(f"model.pretrained: {folder} has weights that can't be read: {error}") from error


def read_tokenizer(folder: Path) -> Any:
    """A folder's tokenizer. Raises ValueError where there is none that can be read."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"tokenizer: {folder} has none that can be read; {str(error).splitlines()[0]}") from error
