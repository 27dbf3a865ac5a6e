"""What other frameworks and templates call a setting, and its name here."""

from __future__ import annotations

from collections.abc import Iterable

_OTHER_NAMES = {
    "optimizer.lr": ("lr", "learning_rate", "base_lr", "max_lr"),
    "optimizer.weight_decay": ("weight_decay", "wd"),
    "optimizer.momentum": ("momentum",),
    "scheduler.warmup_fraction": ("warmup", "warmup_steps", "warmup_ratio", "warmup_iters"),
    "data.num_workers": ("num_workers", "workers", "dataloader_num_workers"),
    "global_batch_size": ("batch_size", "batch", "train_batch_size", "bs", "total_batch_size"),
    "micro_batch_size": (
        *("accumulate_grad_batches", "gradient_accumulation_steps", "grad_accum", "accumulation_steps"),
        *("per_device_train_batch_size", "device_batch_size"),
    ),
    "trainer.max_epochs": ("epoch", "epochs", "max_epochs", "num_epochs", "num_train_epochs", "n_epochs"),
    "trainer.max_steps": ("steps", "max_steps", "num_steps", "max_iters", "iterations", "train_steps"),
    "trainer.max_time": ("max_time", "time_limit"),
    "trainer.devices": (
        "gpus",
        "devices",
        "num_gpus",
        "ngpus",
        "n_gpus",
        "nproc_per_node",
        "num_devices",
        "world_size",
    ),
    "trainer.num_nodes": ("nodes", "num_nodes", "nnodes", "n_nodes"),
    "trainer.accelerator": ("accelerator", "device"),
    "trainer.gradient_clip_val": ("gradient_clip_val", "max_grad_norm", "clip_grad_norm", "grad_clip", "clip"),
    "trainer.val_check_interval": ("val_check_interval", "eval_interval", "eval_steps", "eval_every"),
    "trainer.check_val_every_n_epoch": ("eval_strategy", "evaluation_strategy"),
    "trainer.strategy.activation_checkpointing": ("gradient_checkpointing", "activation_checkpointing"),
    "trainer.log_every_n_steps": ("log_every_n_steps", "log_interval", "logging_steps"),
    "trainer.deterministic": ("deterministic",),
    "callbacks.last_checkpoint.every_n_steps": ("save_steps", "save_every", "save_interval", "checkpoint_every"),
    "callbacks.last_checkpoint.keep": ("save_total_limit",),
    "callbacks.best_checkpoint.monitor": ("monitor", "metric_for_best_model"),
    "callbacks=[default,early_stopping]": ("early_stopping", "early_stop"),
    "callbacks.early_stopping.patience": ("patience", "early_stopping_patience"),
    "trainer.limit_val_batches": ("eval_iters", "limit_val_batches"),
    "precision": ("bf16", "fp16", "dtype", "amp", "use_amp", "mixed_precision"),
    "matmul_precision": ("tf32",),
    "strategy": ("ddp", "fsdp", "deepspeed", "zero", "distributed", "distributed_strategy"),
    "seed": ("random_seed", "manual_seed"),
    "mode": ("stage", "test", "eval", "do_eval", "do_train", "do_predict"),
    "experiment": ("recipe", "hparams_search"),
    "resume": ("resume_from", "resume_from_checkpoint", "load_checkpoint"),
    "ckpt_path": ("checkpoint", "checkpoint_path"),
    "init_from": ("pretrained", "load_weights", "finetune_from"),
    "run_id": ("version", "run_name"),
    "name": ("experiment_name", "exp_name", "task_name", "project", "output_dir", "save_dir", "log_dir"),
    "logger": ("wandb", "report_to", "wandb_log"),
    "compile": ("torch_compile",),
}
_CHOICES: dict[str, dict[str, tuple[str, ...]]] = {
    "precision": {
        "bf16-mixed": ("bf16", "bfloat16", "amp_bf16"),
        "16-mixed": ("16", "fp16", "float16", "half", "amp", "mixed"),
        "32-true": ("32", "fp32", "float32", "full"),
        "64-true": ("64", "fp64", "float64", "double"),
    },
    "debug": {"one_batch": ("fdr", "fast_dev_run")},
    "strategy": {
        "deepspeed_stage_1": ("zero1", "zero_1", "zero-1"),
        "deepspeed_stage_2": ("zero", "zero2", "zero_2", "zero-2"),
        "deepspeed_stage_3": ("zero3", "zero_3", "zero-3"),
        "fsdp_grad_op": ("shard_grad_op", "ddp_sharded", "fairscale"),
        "fsdp_hybrid": ("hsdp", "hybrid_shard"),
        "fsdp": ("full_shard", "fsdp_full"),
        "fsdp_tp": ("tp", "tensor_parallel"),
        "single": ("none", "single_gpu"),
        "ddp": ("horovod", "dist", "distributed"),
    },
}


def setting(name: str) -> str | None:
    """Return the key here of what goes by a name elsewhere, with or without the node that it stands in; None if none.

    `lr` and `optimizer.learning_rate` are optimizer.lr, `trainer.gpus` is trainer.devices.
    """
    word = name.rpartition(".")[2].lower().replace("-", "_")
    return next((key for key, others in _OTHER_NAMES.items() if word in others), None)


def argument(node: str, name: str, accepted: Iterable[str]) -> str | None:
    """Return the argument of a node's code that goes by another name elsewhere, if the code takes it; else None."""
    key = setting(name)
    group, _, argument = (key or "").rpartition(".")
    return argument if group == node and argument in accepted else None


def choice(group: str, name: str) -> str | None:
    """Return the choice of a group that goes by a name elsewhere; None if none."""
    return next((choice for choice, others in _CHOICES.get(group, {}).items() if name.lower() in others), None)
