"""Names of settings in other frameworks and templates, and the corresponding names here."""

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
    "cluster.node_rank": ("node_rank", "machine_rank"),
    "cluster.main_address": ("main_address", "master_addr", "master_address", "main_process_ip"),
    "cluster.main_port": ("main_port", "master_port", "main_process_port"),
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
    "mode": ("stage", "eval", "do_eval", "do_train", "do_predict"),
    "experiment": ("recipe", "hparams_search"),
    "resume": ("resume_from", "resume_from_checkpoint", "load_checkpoint"),
    "ckpt_path": ("checkpoint", "checkpoint_path"),
    "init_from": ("pretrained", "load_weights", "finetune_from"),
    "run_id": ("version", "run_name"),
    "name": (
        "experiment_name",
        "exp_name",
        "task_name",
        "project",
        "project_name",
        "output_dir",
        "save_dir",
        "log_dir",
    ),
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
    "debug": {"one_batch": ("fdr", "fast_dev_run", "default")},
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


_OVER = "--cfg job, which shows the config and starts nothing"
_PLACE = "name=NAME run_id=RUN_ID, whose folder is runs/NAME/RUN_ID, or hydra.run.dir=FOLDER"
_RATES = "-m optimizer.lr=1e-4,1e-3,1e-2 trainer.max_steps=100 compare=true, which compares short runs"
_INSTEAD = {  # what to type for keys of lightning-hydra-template without a single equivalent key
    "extras": f"{_OVER}; tags=[a,b] to select runs in a comparison",
    "extras.print_config": _OVER,
    "extras.ignore_warnings": "PYTHONWARNINGS=ignore before python",
    "extras.enforce_tags": "tags=[a,b], which is optional",
    "print_config": _OVER,
    "ignore_warnings": "PYTHONWARNINGS=ignore before python",
    "enforce_tags": "tags=[a,b], which is optional",
    "paths": _PLACE,
    "paths.data_dir": "the corresponding argument of the data, which --help data lists",
    "data_dir": "the corresponding argument of the data, which --help data lists",
    **dict.fromkeys(("work_dir", "original_work_dir", "root_dir"), _PLACE),
    "train": "mode=test ckpt_path=PATH to only run a test",
    "test": "trainer.limit_test_batches=0 to fit without a test, or mode=test ckpt_path=PATH to only run a test",
    "optimized_metric": "objective=NAME",
    "datamodule": "data=NAME, or data.NAME=VALUE",
    "hydra.sweeper.n_trials": "hydra/sweeper=optuna as well",
    "local": "--config-dir=FOLDER, a folder with configs for this machine",
    "model.compile": "compile=true",
    "model.torch_compile": "compile=true",
    "trainer.tpu_cores": "trainer.devices=N; TPUs are not supported",
    "trainer.auto_lr_find": _RATES,
    "trainer.auto_scale_batch_size": "micro_batch_size=auto",
    "trainer.track_grad_norm": "callbacks=[default,grad_norm]",
    "trainer.resume_from_checkpoint": "resume=PATH",
    "trainer.weights_summary": "callbacks=[default,model_summary]",
    "callbacks.model_checkpoint": "callbacks.best_checkpoint.monitor=NAME, or callbacks.last_checkpoint.keep=N",
    "callbacks.rich_progress_bar": "~callbacks.progress to hide the progress line",
    "callbacks.learning_rate_monitor": "callbacks.lr_monitor.logging_interval=step",
}
_ONLY_CSV = "logger=csv, which writes only metrics.csv"
_CHOICES_INSTEAD = {  # its config files and common words; lr_finder was a config file here
    "callbacks": {
        "lr_finder": _RATES,
        "none": "callbacks=checkpoint, which writes checkpoints and nothing else",
        "model_checkpoint": "callbacks=checkpoint",
        "rich_progress_bar": "callbacks=default, which shows the progress",
    },
    "logger": {"none": _ONLY_CSV, "false": _ONLY_CSV, "many_loggers": "logger=[default,wandb]"},
}


def instead(key: str) -> str | None:
    """Return what to type for another template's key that has no single equivalent; None if the key is unknown."""
    while key:
        if key in _INSTEAD:
            return _INSTEAD[key]
        key = key.rpartition(".")[0]
    return None


def choice_instead(group: str, name: str) -> str | None:
    """Return what to type for another template's choice; None if the choice is unknown."""
    return _CHOICES_INSTEAD.get(group, {}).get(name)


def names(key: str) -> tuple[str, ...]:
    """Return the names of a config key in other frameworks."""
    return _OTHER_NAMES[key]


def setting(name: str) -> str | None:
    """Return the config key for another framework's name, with or without its node; None if there is none.

    `lr` and `optimizer.learning_rate` are optimizer.lr, `trainer.gpus` is trainer.devices.
    """
    word = name.rpartition(".")[2].lower().replace("-", "_")
    return next((key for key, others in _OTHER_NAMES.items() if word in others), None)


def argument(node: str, name: str, accepted: Iterable[str]) -> str | None:
    """Return the argument of a node's code for another framework's name; None unless the code accepts the argument."""
    key = setting(name)
    group, _, argument = (key or "").rpartition(".")
    return argument if group in (node, node.rpartition(".")[2]) and argument in accepted else None


def choice(group: str, name: str) -> str | None:
    """Return a group's choice for another framework's name; None if there is none."""
    return next((choice for choice, others in _CHOICES.get(group, {}).items() if name.lower() in others), None)
