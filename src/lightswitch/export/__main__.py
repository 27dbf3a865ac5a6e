"""Write the weights of a run as safetensors, as a torch state dict, or as a Lightning checkpoint file.

python -m lightswitch.export runs/NAME/RUN_ID -o model.safetensors
python -m lightswitch.export runs/NAME/RUN_ID/checkpoints/last.ckpt -o model.pt --dtype bfloat16
python -m lightswitch.export runs/NAME/RUN_ID -o model.ckpt
python -m lightswitch.export runs/NAME/RUN_ID -o exports/model
python -m lightswitch.export runs/NAME/RUN_ID -o exports/model --format hf --push-to-hub USER/MODEL
python -m lightswitch.export runs/NAME/RUN_ID -o exports/adapters --format peft

-o names a .safetensors file, a .pt file, a .ckpt file for Lightning's load_from_checkpoint, or a folder, in which
model.safetensors is written. The model's config is written beside it as FILE.yaml, so that
lightswitch.load("model.safetensors") returns the model. The weights are held in memory whole.
--format hf writes a folder for transformers' from_pretrained, with adapters merged into the weights, and --format peft
one of the adapters alone; the model must have a method to_hf, or to_peft. --push-to-hub also uploads that folder, to a
repository that it makes private if there is none.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightswitch.errors import Command, Refused

FOLDER_FILE = "model.safetensors"  # the file name if -o names a folder
DTYPES = ("bfloat16", "float16", "float32")
LOADS = {  # by format
    "hf": 'transformers.AutoModelForCausalLM.from_pretrained("{}")',
    "peft": 'peft.PeftModel.from_pretrained(BASE_MODEL, "{}")',
}


def main(words: Sequence[str] | None = None) -> None:
    """Run the command. A problem that the user can fix ends it with exit code 2 and a line on stderr."""
    parser = _parser()
    arguments = parser.parse_args(words)
    try:
        if arguments.format:
            _export_to_hub(arguments)
        elif arguments.push_to_hub:
            raise Refused(f"--push-to-hub {arguments.push_to_hub} uploads a folder; add --format hf or peft")
        else:
            _refuse_to_replace(arguments.output)  # before torch is imported and checksums are compared
            _export(arguments)
    except (OSError, Refused) as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = Command("lightswitch.export", __doc__)
    parser.add_argument(
        "source",
        type=Path,
        metavar="RUN_OR_CHECKPOINT",
        help="a checkpoint, or a run directory: its best checkpoint, else its last",
    )
    parser.add_argument("-o", "--output", type=_file, metavar="FILE", required=True)
    parser.add_argument(
        "--format", choices=LOADS, help="hf: a folder for transformers; peft: one of adapters; default: tensors alone"
    )
    parser.add_argument("--push-to-hub", metavar="REPO", help="upload the folder of --format to the Hugging Face hub")
    parser.add_argument("--dtype", choices=DTYPES, help="type of all floating-point tensors; default: as saved")
    return parser


def _file(text: str) -> Path:
    path = Path(text)
    if text.endswith("/") or (path.is_dir() and path.suffix != ".ckpt") or not path.suffix:
        return path / FOLDER_FILE
    if path.suffix not in (".safetensors", ".pt", ".ckpt"):
        raise argparse.ArgumentTypeError(f"{text}: end it with .safetensors, .pt or .ckpt, or with / if it is a folder")
    return path


def _refuse_to_replace(file: Path) -> None:
    for path in (file, *(file.with_name(file.name + end) for end in (".yaml", ".index.json"))):
        if path.exists():
            raise Refused(f"{path} exists already; remove it, or name another file")


def _export(arguments: argparse.Namespace) -> None:
    import torch

    from lightswitch.checkpoints import weight_files
    from lightswitch.checkpoints.reading import Reader
    from lightswitch.export.models import checkpoint_at, model_config

    checkpoint = checkpoint_at(arguments.source)
    config = model_config(checkpoint)
    print(f"reads      {checkpoint}", flush=True)
    reader = Reader(checkpoint, group=None)
    file: Path = arguments.output
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    written = weight_files.write(reader, config.node, file, dtype)
    for path in written:
        print(f"written    {path}")
    print(f"compared   {sum(path.stat().st_size for path in written) / 1e6:.2f} MB against the checkpoint")
    print(f'load       model = lightswitch.load("{file}")')
    if file.suffix == ".ckpt":
        print(f'Lightning  {config.target.rpartition(".")[2]}.load_from_checkpoint("{file}")')


# A folder for Hugging Face's libraries


def _export_to_hub(arguments: argparse.Namespace) -> None:
    """Write the model to a temporary folder, read it back as its users do, compare, and rename the folder.

    The whole model is in memory, twice during the comparison.
    """
    if arguments.output.name != FOLDER_FILE:
        raise Refused(f"-o {arguments.output}: --format {arguments.format} writes a folder; name one")
    folder: Path = arguments.output.parent
    if folder.exists():
        raise Refused(f"{folder} exists already; remove it, or name another folder")
    from lightswitch.checkpoints import directory, weight_files
    from lightswitch.export.models import checkpoint_at
    from lightswitch.regular_files import MARK, remove_tree

    checkpoint = checkpoint_at(arguments.source)
    print(f"reads      {checkpoint}", flush=True)
    model, *companions = _parts(checkpoint, arguments.format, arguments.dtype)
    partial = directory.make_empty(folder.with_name(f"{folder.name}.partial"))
    try:
        model.save_pretrained(partial)
        for part in companions:
            part.save_pretrained(partial)
        read = type(model).from_pretrained(partial, local_files_only=True).state_dict()
        for name, value in model.state_dict().items():
            if name not in read or not weight_files.same_bits(read[name], value):
                raise OSError(f"{partial.name}: read back different data for {name} than was written")
    except BaseException:
        remove_tree(partial)
        raise
    (partial / MARK).unlink()
    partial.replace(folder)
    for path in sorted(folder.iterdir()):
        print(f"written    {path}")
    print(f"load       model = {LOADS[arguments.format].format(folder)}")
    if arguments.push_to_hub:
        _push(folder, arguments.push_to_hub)


def _push(folder: Path, repository: str) -> None:
    from huggingface_hub import HfApi

    try:
        HfApi().create_repo(repository, private=True, exist_ok=True)
        print(f"uploaded   {HfApi().upload_folder(repo_id=repository, folder_path=folder)}")
    except Exception as error:  # of a name, a token, or the network, whose library differs by version
        what = f"--push-to-hub {repository}: {str(error).strip().partition(chr(10))[0]}"
        raise Refused(f"{what}; type hf auth login, then hf upload {repository} {folder}") from error


def _parts(checkpoint: Path, format: str, dtype: str | None) -> list[Any]:
    """Return the objects to save: a model of transformers or its adapters in a dtype, and companions as a tokenizer."""
    import torch

    from lightswitch.export.models import load

    model = load(checkpoint)
    name, convert = type(model).__name__, getattr(model, f"to_{format}", None)
    if convert is None:
        raise Refused(f"{name} has no method to_{format}, which returns what --format {format} saves; leave it out")
    try:
        parts = list[Any](convert())
    except (ValueError, ModuleNotFoundError) as error:
        raise Refused(f"{name}: {error}") from error
    if dtype is not None:
        finite = {name for name, value in parts[0].state_dict().items() if value.isfinite().all()}
        parts[0].to(getattr(torch, dtype))
        for name, value in parts[0].state_dict().items():
            if name in finite and not value.isfinite().all():
                raise Refused(f"{name} has values beyond the range of {dtype}; use --dtype float32, or bfloat16")
    return parts


if __name__ == "__main__":
    main()
