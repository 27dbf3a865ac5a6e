"""GPT-2 under each strategy, against a plain loop in nanoGPT's manner."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from tests.engine.conftest import CHECKOUT
from tests.engine.gpu import machine
from tests.engine.gpu.cells import Cell, Found, Piece, Result, Scale

ON_ONE = ("single",)
STRATEGIES = ("ddp", "fsdp", "fsdp_grad_op", *(f"deepspeed_stage_{stage}" for stage in (1, 2, 3)))
TINY = ("single", "fsdp")
COMPILED = "compile=true"
TOKENS = 2**22


@dataclass(frozen=True)
class Size:
    """
    Attributes:
        model: the choice of conf/model.
        micro_batch: sequences that a device takes at once.
        accumulation: micro batches of a step.
        warm_up_steps: before those that are measured; a compilation ends in them.
    """

    model: str
    micro_batch: int
    accumulation: int
    warm_up_steps: int
    steps: int


GPT_TINY = Size("gpt", micro_batch=2, accumulation=2, warm_up_steps=2, steps=3)
SEQUENCES = 32  # a step and device


def gpt2(memory_bytes: int) -> Size:
    """Return GPT-2 with the micro batch that a card of so much memory takes: 1.3 GB a sequence at most."""
    micro_batch = 16 if memory_bytes > 60e9 else 8 if memory_bytes > 30e9 else 4
    return Size("gpt2", micro_batch, SEQUENCES // micro_batch, warm_up_steps=10, steps=20)


def eager(scale: Scale) -> Piece:
    """Return a cell for each strategy and number of devices."""
    return Piece("benchmark", _cells(scale, is_compiled=False))


def compiled(scale: Scale) -> Piece:
    """Return the same cells under torch.compile."""
    return Piece("compiled", _cells(scale, is_compiled=True))


def _cells(scale: Scale, is_compiled: bool) -> list[Cell]:
    lacks = "" if not is_compiled or (CHECKOUT / "conf" / "compile").exists() else f"there is no switch {COMPILED}"
    counts = sorted({1, scale.devices})[:1] if scale.is_tiny else sorted({1, scale.devices})
    return [
        Cell(f"{strategy} × {devices}", partial(_against_plain, scale, strategy, devices, is_compiled), lacks, 480)
        for devices in counts
        for strategy in (TINY if scale.is_tiny else (*(ON_ONE if devices == 1 else ()), *STRATEGIES))
    ]


def _against_plain(
    scale: Scale,
    strategy: str,
    devices: int,
    is_compiled: bool,
    folder: Path,
    seconds: float,
    so_far: Mapping[str, Result],
) -> Result:
    """Run the plain loop, train.py, and the plain loop again: what drifts in between is in the plain loop's mean."""
    end, size = time.monotonic() + seconds, GPT_TINY if scale.is_tiny else gpt2(machine.memory_bytes(0))
    shape = shape_of(size.model)
    write_tokens(folder, shape["vocab_size"])
    plain = partial(_plain, scale, size, shape, devices, is_compiled, folder)
    first = plain(end - time.monotonic())
    ours = _ours(scale, size, strategy, devices, is_compiled, folder, end - time.monotonic())
    second = plain(end - time.monotonic())
    plain_step_seconds = (first["step_seconds"] + second["step_seconds"]) / 2
    tokens = size.micro_batch * size.accumulation * devices * shape["context"]
    figures = partial(_figures, tokens=tokens, flops=tokens * flops_per_token(shape), gpus=devices if scale.gpus else 0)
    found = {
        **figures(ours),
        "save_seconds": [round(one, 3) for one in ours["save_seconds"]],
        "ratio": round(ours["step_seconds"] / plain_step_seconds, 3),
        "plain": figures(first),
        "plain_step_seconds": [round(one["step_seconds"], 4) for one in (first, second)],
    }
    return Result(found, "" if math.isfinite(ours["loss"]) else "its loss is not finite")


def _figures(measured: Mapping[str, Any], tokens: int, flops: float, gpus: int) -> Found:
    """Return what is shown of a run, given the tokens and the operations of its step."""
    peak = machine.peak_flops(torch.cuda.get_device_name(0)) if gpus else None
    share = None if peak is None else flops / measured["step_seconds"] / (peak * gpus)
    return {
        "tokens_per_second": round(tokens / measured["step_seconds"]),
        "share_of_peak": None if share is None else round(share, 3),
        "peak_gib": round(measured["peak_bytes"] / 2**30, 2),
        "first_step_seconds": round(measured["first_step_seconds"], 1),
    }


def flops_per_token(shape: Mapping[str, int]) -> float:
    """Return the operations of a forward and a backward pass, a token, as nanoGPT's estimate_mfu counts them.

    6 for each parameter that is multiplied with, the tied embedding among them, and 12 × layers × width × context for
    attention (Chowdhery et al. 2022, appendix B).
    """
    layers, width = shape["layers"], shape["width"]
    parameters = 12 * layers * width**2 + shape["vocab_size"] * width
    return 6 * parameters + 12 * layers * width * shape["context"]


def shape_of(model: str) -> dict[str, Any]:
    """Return what a choice of conf/model says of its size, without the optimizer; what it inherits as well."""
    node = OmegaConf.load(CHECKOUT / "conf" / "model" / f"{model}.yaml")
    whole = OmegaConf.merge(OmegaConf.load(CHECKOUT / "conf" / "model" / "gpt.yaml"), node)
    left_out = ("_target_", "defaults", "optimizer", "scheduler")
    return {str(key): whole[key] for key in whole if key not in left_out}


def write_tokens(folder: Path, vocab_size: int) -> None:
    """Write train.bin and val.bin of made-up tokens."""
    generator = np.random.default_rng(0)
    for name in ("train", "val"):
        generator.integers(0, vocab_size, TOKENS).astype(np.uint16).tofile(folder / f"{name}.bin")


def data_of(folder: Path) -> tuple[str, ...]:
    """Return the switches by which a run reads them."""
    return "data=tokens", f"data.folder={folder}"


def run(command: Sequence[str], folder: Path, seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a command on as many threads as it likes, with no code that another one has compiled.

    Raises:
        subprocess.TimeoutExpired: it takes longer.
    """
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environ |= {f"{name}_CACHE_DIR": str(folder / name) for name in ("TORCHINDUCTOR", "TRITON")}
    with (folder / "out").open("w+") as out, (folder / "err").open("w+") as err:
        process = subprocess.Popen(command, cwd=folder, env=environ, stdout=out, stderr=err, start_new_session=True)
        try:
            code = process.wait(max(1.0, seconds))
        except subprocess.TimeoutExpired:
            end_session(process)
            raise
    texts = ((folder / name).read_text() for name in ("out", "err"))
    return subprocess.CompletedProcess(command, code, *texts)


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _plain(
    scale: Scale, size: Size, shape: dict[str, Any], devices: int, is_compiled: bool, folder: Path, seconds: float
) -> dict[str, Any]:
    plan = {
        "model": shape,
        "tokens": str(folder / "train.bin"),
        "device": scale.torch_device,
        "began": time.time(),
        "micro_batch": size.micro_batch,
        "accumulation": size.accumulation,
        "warm_up_steps": size.warm_up_steps,
        "steps": size.steps,
        "compiled": is_compiled,
    }
    several = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}") if devices > 1 else ()
    command = [sys.executable, *several, "-m", "benchmarks.plain_gpt", str(folder), json.dumps(plan)]
    return _measured(command, folder, seconds)


def _ours(
    scale: Scale, size: Size, strategy: str, devices: int, is_compiled: bool, folder: Path, seconds: float
) -> dict[str, Any]:
    between_saves = size.warm_up_steps + size.steps
    command = [
        *(sys.executable, str(CHECKOUT / "train.py"), f"model={size.model}", *data_of(folder)),
        *(f"strategy={strategy}", f"trainer.devices={devices}", f"trainer.accelerator={scale.accelerator}"),
        *("precision=bf16-mixed", "optimizer.lr=6e-4", "optimizer.betas=[0.9,0.95]"),
        f"global_batch_size={size.micro_batch * size.accumulation * devices}",
        f"micro_batch_size={size.micro_batch}",
        f"trainer.max_steps={2 * between_saves + 1}",
        *("trainer.limit_val_batches=0", "trainer.limit_test_batches=0", "~callbacks.best_checkpoint"),
        *(f"callbacks.last_checkpoint.every_n_steps={between_saves}", "run_id=measured", "name=gpt"),
        *("callbacks.measuring._target_=benchmarks.measuring.Measuring", f"callbacks.measuring.folder={folder}"),
        f"callbacks.measuring.warm_up_steps={size.warm_up_steps}",
        f"callbacks.measuring.steps={size.steps}",
        f"callbacks.measuring.began={time.time()}",
        *([COMPILED] if is_compiled else []),
    ]
    found = _measured(command, folder, seconds)
    results = json.loads((folder / "runs" / "gpt" / "measured" / "results.json").read_text())
    return {**found, "loss": results["train/loss"]}


def _measured(command: list[str], folder: Path, seconds: float) -> dict[str, Any]:
    """Return what rank 0 of a run measured, with the peak of all ranks."""
    finished = run(command, folder, seconds)
    if finished.returncode:
        raise RuntimeError(f"exit code {finished.returncode}: {finished.stderr.strip()[-1000:]}")
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("measured_*.json"))]
    return {**ranks[0], "peak_bytes": max(rank["peak_bytes"] for rank in ranks)}
