"""What a strategy can't do is told in a line: before a process is started, or, of a module, before it is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.conftest import PLAIN, Train
from tests.engine.requests import composed, composing, problems
from tests.engine.tiny import NO_CHECKPOINTS, PICTURES

CPU = (*NO_CHECKPOINTS, "trainer.accelerator=cpu", "trainer.devices=2")
OPTIONS = {
    "ddp timeout_seconds=0": "trainer.strategy.timeout_seconds=0: use a number from 1 to 2000000",
    "ddp process_group_backend=nccl": "trainer.strategy.process_group_backend=nccl is for GPUs, and the run is on the "
    "CPU; use gloo",
    "ddp process_group_backend=ucc": "trainer.strategy.process_group_backend=ucc: found str, "
    "expected gloo, mpi, nccl, null. Did you mean nccl?",
    "ddp comm_hook=fp8": "trainer.strategy.comm_hook=fp8: found str, expected bf16, fp16, null. Did you mean fp16?",
    "ddp timeout=60": "trainer.strategy.timeout: DDP takes no timeout; type trainer.strategy.timeout_seconds=60",
    "fsdp sharding_strategy=FULL": "trainer.strategy.sharding_strategy=FULL: found str, expected "
    "FULL_SHARD, HYBRID_SHARD, NO_SHARD, SHARD_GRAD_OP. Did you mean FULL_SHARD?",
    "fsdp auto_wrap_policy=[Block]": "trainer.strategy.auto_wrap_policy: FSDP takes no auto_wrap_policy; type "
    "trainer.strategy.units=[Block]",
}


def test_of_options(tmp_path: Path) -> None:
    found = {}
    with composing():
        for typed in OPTIONS:
            strategy, *options = typed.split()
            words = (*PLAIN, *CPU, f"strategy={strategy}", *(f"trainer.strategy.{option}" for option in options))
            found[typed] = problems(composed(*words, into=tmp_path))
    assert found == {typed: {line} for typed, line in OPTIONS.items()}


MODULES = {  # others are in the catalogue: tests/engine/modules
    "OwnSharding fsdp": "OwnSharding shards itself in configure_model; leave fully_shard and parallelize_module to the "
    "strategy",
    "NothingToShard fsdp": "there is nothing to shard in NothingToShard; use strategy=ddp",
    "Lazy fsdp": "net.1.weight, net.1.bias: a lazy layer (LazyLinear, or -1 channels) has no "
    "shape before its first forward pass, but an optimizer and checkpoints need one; call the module on a batch, under "
    "torch.no_grad(), at the end of its constructor or in setup, or give the layer its number of inputs",
}


@pytest.mark.nightly
@pytest.mark.parametrize("module", MODULES)
def test_of_modules(module: str, train: Train) -> None:
    name, strategy = module.split()
    words = (f"model._target_=tests.engine.foreign.{name}", PICTURES, *CPU, f"strategy={strategy}")
    run = train(*words, ranks=2, check=False)
    assert run.returncode == 2
    assert run.err.splitlines()[0] == f"error: {MODULES[module]}"
    assert "Traceback" not in run.err
