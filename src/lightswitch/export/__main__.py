"""Write the weights of a run as safetensors, as a torch state dict, or as a Lightning checkpoint file.

python -m lightswitch.export runs/NAME/RUN_ID -o model.safetensors
python -m lightswitch.export runs/NAME/RUN_ID/checkpoints/last.ckpt -o model.pt --dtype bfloat16
python -m lightswitch.export runs/NAME/RUN_ID -o model.ckpt
python -m lightswitch.export runs/NAME/RUN_ID -o exports/model --shard-size 500MB
python -m lightswitch.export runs/NAME/RUN_ID -o exports/model --format hf

-o names a .safetensors file, a .pt file, a .ckpt file for Lightning's load_from_checkpoint, or a folder, in which
model.safetensors is written. The model's config is written beside it as FILE.yaml, so that
lightswitch.load("model.safetensors") returns the model. Safetensors above the shard size are split into several files
with an index, as Hugging Face does; memory holds one of them at a time. A .pt or .ckpt file is held in memory whole.
--format hf writes a folder for transformers' from_pretrained; the model must have a method to_hf.
"""

from __future__ import annotations

import argparse
import glob
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from lightswitch.errors import Command, Refused, listed

FOLDER_FILE = "model.safetensors"  # the file name if -o names a folder
DTYPES = ("bfloat16", "float16", "float32")


def main(words: Sequence[str] | None = None) -> None:
    """Run the command. A problem that the user can fix ends it with exit code 2 and a line on stderr."""
    parser = _parser()
    arguments = parser.parse_args(words)
    try:
        if arguments.format == "hf":
            _export_hf(arguments)
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
        "--format", choices=("hf",), help="hf: a folder for transformers; default: the model's tensor names"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="type of all floating-point tensors; default: as saved")
    parser.add_argument(
        "--shard-size", type=_bytes, default="5GB", metavar="SIZE", help="maximum size of a file; default: 5GB"
    )
    return parser


def _file(text: str) -> Path:
    path = Path(text)
    if text.endswith("/") or (path.is_dir() and path.suffix != ".ckpt") or not path.suffix:
        return path / FOLDER_FILE
    if path.suffix not in (".safetensors", ".pt", ".ckpt"):
        raise argparse.ArgumentTypeError(f"{text}: end it with .safetensors, .pt or .ckpt, or with / if it is a folder")
    return path


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(MB|GB)", text)
    if found is None or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a size; write it as 500MB or 5GB")
    return int(float(found[1]) * {"MB": 10**6, "GB": 10**9}[found[2]])


def _refuse_to_replace(file: Path) -> None:
    parts = file.parent.glob(f"{glob.escape(file.stem)}-*-of-*{file.suffix}")
    for path in (file, *(file.with_name(file.name + end) for end in (".yaml", ".index.json")), *parts):
        if path.exists():
            raise Refused(f"{path} exists already; remove it, or name another file")


def _export(arguments: argparse.Namespace) -> None:
    import torch

    from lightswitch.checkpoints import weight_files
    from lightswitch.checkpoints.weight_files import Weights
    from lightswitch.export.models import checkpoint_at, model_config

    checkpoint = checkpoint_at(arguments.source)
    config = model_config(checkpoint)
    print(f"reads      {checkpoint}", flush=True)
    weights = Weights(checkpoint)
    file: Path = arguments.output
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    if file.suffix in weight_files.OF_TORCH and not weights.lists_tied:
        message = (
            "the checkpoint, of an earlier version, does not list tied tensors; each is written under only one name"
        )
        print(f"warning: {message}", file=sys.stderr)
    progress = _Progress(sum(weight_files.bytes_of(weights, name, dtype) for name in weights.like))
    try:
        written = weight_files.write(weights, config.node, file, dtype, arguments.shard_size, progress.read)
    finally:
        progress.end()
    for path in written:
        print(f"written    {path}")
    print(f"compared   {progress.total_bytes / 1e6:.2f} MB against the checkpoint")
    print(f"load       {_call(file)}")
    if file.suffix == ".ckpt":
        print(f'Lightning  {config.target.rpartition(".")[2]}.load_from_checkpoint("{file}")')
    if weights.transient:
        print(f"left out   {_left_out(weights.transient, file.suffix)}")


def _left_out(transient: Sequence[str], suffix: str) -> str:
    """Return what other readers of a file do without: a state dict has no place for non-persistent buffers."""
    where = "by load_from_checkpoint" if suffix == ".ckpt" else "of this format; -o NAME.ckpt keeps them"
    named = listed(list(transient), "buffers", shown=8)
    return f"{named}, which training has changed and the module registers with persistent=False, {where}"


def _export_hf(arguments: argparse.Namespace) -> None:
    if arguments.output.name != FOLDER_FILE:
        raise Refused(f"-o {arguments.output}: --format hf writes a folder; name one")
    folder = arguments.output.parent
    if folder.exists():
        raise Refused(f"{folder} exists already; remove it, or name another folder")
    import torch

    from lightswitch.export import hub
    from lightswitch.export.models import checkpoint_at

    checkpoint = checkpoint_at(arguments.source)
    print(f"reads      {checkpoint}", flush=True)
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    for path in hub.write(checkpoint, folder, dtype, arguments.shard_size):
        print(f"written    {path}")
    print(f'load       model = transformers.AutoModelForCausalLM.from_pretrained("{folder}")')


def _call(file: Path) -> str:
    """Return the call that loads the model, with the argument that is required if the config is not trusted."""
    from lightswitch.checkpoints import weight_files
    from lightswitch.export.models import read_config, untrusted

    config = read_config(weight_files.config_of(file))
    try:
        called = untrusted(config.node, config.file.resolve().parent)
    except ImportError:  # the code may be elsewhere
        called = None
    if called is None:
        return f'model = lightswitch.load("{file}")'
    return f'model = lightswitch.load("{file}", model=MyModel(...)), or trust=True, which runs {called}'


class _Progress:
    """Progress bar in a terminal; prints nothing elsewhere."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._bar = tqdm(desc="export", total=total_bytes, unit="B", unit_scale=True, disable=None)

    def read(self, count: int) -> None:
        self._bar.update(count)

    def end(self) -> None:
        self._bar.close()


if __name__ == "__main__":
    main()
