"""A DeepSpeed config file means what the run means, or is refused by the names of its keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightswitch.deepspeed.config import Run, problems, resolved
from lightswitch.errors import Refused
from lightswitch.preflight.strategies import Request
from lightswitch.preflight.strategies import problems as limits
from tests.engine.conftest import PLAIN, Train
from tests.engine.tiny import NO_CHECKPOINTS

pytest.importorskip("deepspeed")
from lightswitch.deepspeed.strategy import DeepSpeed  # imports deepspeed

RUN = Run(precision="32-true", micro_batch=4, accumulation=3, replicas=2, clip_norm=0.5)
ZERO = {"zero_optimization": {"stage": 2}}
AUTO: dict[str, Any] = {  # as people bring it from other frameworks
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": 0,
    },
    "steps_per_print": 1000,
}


def test_auto_is_taken_from_the_run() -> None:
    assert list(problems(AUTO, RUN)) == []
    full = resolved(AUTO, RUN)
    assert {key: full[key] for key in list(AUTO)[:4]} == {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.5,
    }
    assert "auto" not in json.dumps(full)
    assert AUTO["train_batch_size"] == "auto"


def test_auto_that_follows_from_nothing_is_deepspeeds_default() -> None:
    full = resolved(AUTO, RUN)
    assert full["zero_optimization"] == {"stage": 3, "stage3_param_persistence_threshold": 0}


@pytest.mark.parametrize(
    ("precision", "on"),
    [
        ("32-true", None),
        ("bf16-mixed", "torch_autocast"),
        ("bf16-true", "bf16"),
        ("16-mixed", "fp16"),
        ("16-true", "fp16"),
    ],
)
def test_precision_switches_on_one_block(precision: str, on: str | None) -> None:
    full = resolved(AUTO, Run(precision, 4, 3, 2, 0.5))
    assert [name for name in ("fp16", "bf16", "torch_autocast") if full.get(name, {}).get("enabled")] == [on] * bool(on)
    assert full["fp16"]["loss_scale"] == 0


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            {**ZERO, "gradient_cliping": 1.0},
            "gradient_cliping is not a key of DeepSpeed's that a run supports; leave it out. "
            "Did you mean gradient_clipping?",
        ),
        (
            {**ZERO, "elasticity": {}},
            "elasticity is not a key of DeepSpeed's that a run supports; leave it out.",
        ),
        (
            {**ZERO, "optimizer": {"type": "Adam", "params": {"lr": "auto"}}},
            "optimizer is not supported: the model's configure_optimizers makes the optimizer; leave it out",
        ),
        (
            {**ZERO, "train_batch_size": 32},
            "train_batch_size is 32, but the run has 24 from global_batch_size and micro_batch_size; set that, and "
            '"auto" here',
        ),
        (
            {**ZERO, "gradient_clipping": 1.0},
            'gradient_clipping is 1.0, but the run has 0.5 from trainer.gradient_clip_val; set that, and "auto" here',
        ),
        (
            {**ZERO, "bf16": {"enabled": True}},
            'bf16.enabled is true, but the run has precision=32-true; use "auto", or another precision',
        ),
        (
            {"zero_optimization": {"stage": 0}},
            "zero_optimization.stage is 0, which shards nothing; use 1, 2 or 3, or strategy=ddp",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            "zero_optimization.offload_param is ignored at stage 2; use stage 3, or leave it out",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
            "zero_optimization.offload_optimizer.device=nvme: checkpoints do not support offloading to disk; use cpu, "
            "or more devices",
        ),
    ],
)
def test_a_key_that_does_not_do_what_it_says_is_refused(config: dict[str, Any], told: str) -> None:
    assert list(problems(config, RUN)) == [told]


def test_values_that_agree_with_the_run_are_accepted() -> None:
    agreeing = {"train_batch_size": 24, "gradient_accumulation_steps": 3, "gradient_clipping": 0.5}
    assert list(problems({**ZERO, **agreeing, "bf16": {"enabled": False}}, RUN)) == []


@pytest.mark.parametrize(
    ("block", "told"),
    [
        ({"zero_optimization": {"stage": 2, "overlap_com": True}}, "overlap_com: Extra inputs are not permitted"),
        ({"zero_optimization": {"offload_param": {"devise": "cpu"}}}, "offload_param.devise: Extra inputs are not"),
        ({**ZERO, "fp16": {"enable": True}}, "enable: Extra inputs are not permitted (DeepSpeedFP16Config)"),
        ({"zero_optimization": {"stage": "two"}}, "stage: Input should be 0, 1, 2, 3 or 3 (DeepSpeedZeroConfig)"),
    ],
)
def test_what_deepspeed_rejects_in_a_block_is_refused_with_the_strategy(block: dict[str, Any], told: str) -> None:
    with pytest.raises(Refused) as refused:
        DeepSpeed(config=block)
    assert str(refused.value).startswith(f"trainer.strategy.config: {told}")


def test_a_config_as_people_bring_it_is_taken() -> None:
    assert DeepSpeed(config=AUTO).config == AUTO


# Through preflight


def request(strategy: dict[str, Any], **trainer: Any) -> Request:
    trainer = {"precision": "32-true", "gradient_clip_val": 1.0, "devices": 2, **trainer}
    target = "lightswitch.deepspeed.strategy.DeepSpeed"
    return Request({"_target_": target, **strategy}, {}, trainer, 1, 2, accelerator="cpu", batch=(8, None))


def test_clipping_by_value_is_refused() -> None:
    assert list(limits(request({"stage": 2}, gradient_clip_algorithm="value"))) == [
        "DeepSpeed clips gradients only by norm; use trainer.gradient_clip_algorithm=norm, or strategy=ddp"
    ]


def test_an_argument_beside_a_config_file_is_refused() -> None:
    assert list(limits(request({"config": ZERO, "stage": 3}))) == [
        "trainer.strategy.stage is ignored together with trainer.strategy.config; leave one of them out"
    ]


def test_an_offload_to_disk_is_refused_with_that_to_the_host() -> None:
    (told,) = limits(request({"stage": 3, "offload_optimizer": True, "offload_optimizer_device": "nvme"}))
    assert told == (
        "trainer.strategy.offload_optimizer_device=nvme: checkpoints do not support offloading to disk; use "
        "strategy=deepspeed_stage_3_offload"
    )


def test_a_wrong_file_is_refused_in_a_line_each_before_torch_is_imported(train: Train, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({**ZERO, "steps_per_prin": 10, "gradient_clipping": 0.1}))
    clipped = (*PLAIN, "strategy=deepspeed", "trainer.gradient_clip_val=1")
    refused = train(*clipped, f"trainer.strategy.config={tmp_path}/ds.json", check=False)
    assert refused.returncode == 2
    assert refused.err.splitlines() == [
        "error: trainer.strategy.config: steps_per_prin is not a key of DeepSpeed's that a run supports; leave it out. "
        "Did you mean steps_per_print?",
        "error: trainer.strategy.config: gradient_clipping is 0.1, but the run has 1 from trainer.gradient_clip_val; "
        'set that, and "auto" here',
    ]


@pytest.mark.nightly
def test_a_run_trains_by_a_file(train: Train, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(AUTO))
    steps = ("trainer.max_steps=4", "trainer.val_check_interval=4", "trainer.accelerator=cpu", "micro_batch_size=8")
    run = (*PLAIN, *NO_CHECKPOINTS, *steps, "trainer.log_every_n_steps=1", "~callbacks.progress")
    alone = train(*run, "strategy=single")
    by_file = train(*run, "strategy=deepspeed", f"trainer.strategy.config={tmp_path}/ds.json", ranks=2)
    assert by_file.column("train/loss") == pytest.approx(alone.column("train/loss"), abs=1e-5)
