"""Words of other frameworks, templates, guides and older versions, and what to type in their place."""

from __future__ import annotations

import re
from collections.abc import Iterable

_OVER = "--cfg job, which shows the config and starts nothing"
_PLACE = "name=NAME run_id=RUN_ID, whose folder is runs/NAME/RUN_ID, or hydra.run.dir=FOLDER"
_RATES = "-m optimizer.lr=1e-4,1e-3,1e-2 trainer.max_steps=100, which compares short runs"
_ARRAY = "sbatch --array=0-1 slurm/sweep.sh -- seed=1 seed=2"
AT_ONCE = f"sweep.devices_per_job=1, or sweep.jobs_at_once=2 on CPUs; on Slurm {_ARRAY}"
_ONLY_CSV = "logger=csv, which writes only metrics.csv"
_DATA = "the corresponding argument of the data, which --help data lists"

# What to type, and the words that others have for it, without `-` and capitals. {value} is the value that was typed; a
# config key alone takes it as it is. A word is a key's last name; one with a period or `=` is only this key or choice,
# and one that ends with a period is a node, whose keys are those of another node.
_WORDS = {
    # Batches, steps and rates
    "optimizer.lr": "lr learning_rate base_lr max_lr",
    "optimizer.weight_decay": "weight_decay wd",
    "optimizer.momentum": "momentum",
    "scheduler": "lr_scheduler_type",
    "scheduler.warmup_fraction": "warmup_ratio",
    "scheduler.warmup_fraction=FRACTION of all steps, such as 0.1": "warmup warmup_steps warmup_iters num_warmup_steps",
    "data.num_workers": "num_workers workers dataloader_num_workers",
    "global_batch_size": "batch_size batch train_batch_size bs total_batch_size",
    "micro_batch_size": "per_device_train_batch_size device_batch_size train_micro_batch_size_per_gpu",
    "micro_batch_size=N, where N is global_batch_size / (devices × {value})": "accumulate_grad_batches "
    "gradient_accumulation_steps grad_accum accumulation_steps",
    "trainer.max_epochs": "epoch epochs max_epochs num_epochs num_train_epochs n_epochs total_epochs",
    "trainer.max_steps": "steps max_steps num_steps max_iters iterations train_steps max_train_steps total_steps",
    "trainer.max_time": "max_time time_limit",
    "trainer.gradient_clip_val": "gradient_clip_val max_grad_norm clip_grad_norm grad_clip clip gradient_clipping",
    "trainer.val_check_interval": "val_check_interval eval_interval eval_steps eval_every",
    "trainer.check_val_every_n_epoch=1, or trainer.val_check_interval=STEPS": "eval_strategy evaluation_strategy",
    "trainer.limit_val_batches": "eval_iters limit_val_batches",
    "trainer.fast_dev_run": "fast_dev_run",
    "trainer.log_every_n_steps": "log_every_n_steps log_interval logging_steps steps_per_print",
    "trainer.deterministic": "deterministic",
    "micro_batch_size=auto": "trainer.auto_scale_batch_size",
    _RATES: "trainer.auto_lr_find callbacks=lr_finder",
    "leave it out: self.log averages what devices log": "sync_dist",
    # Devices and processes
    "trainer.devices": "gpus devices num_gpus ngpus n_gpus nproc_per_node num_devices world_size num_processes",
    "trainer.num_nodes": "nodes num_nodes nnodes n_nodes num_machines",
    "cluster=manual cluster.node_rank={value}": "node_rank machine_rank",
    "cluster=manual cluster.main_address={value}": "main_address master_addr master_address main_process_ip",
    "cluster=manual cluster.main_port={value}": "main_port master_port main_process_port",
    "trainer.accelerator": "accelerator device",
    "trainer.accelerator=cpu": "trainer=cpu device=cpu",
    "trainer.accelerator=gpu": "trainer=gpu device=gpu device=cuda",
    "trainer.accelerator=mps": "trainer=mps device=mps",
    "trainer.devices=N; TPUs are not supported": "trainer.tpu_cores",
    "trainer.strategy.process_group_backend": "backend dist_backend process_group_backend",
    "trainer.strategy.timeout_seconds": "timeout ddp_timeout nccl_timeout",
    "leave it out: the launcher numbers the ranks": "rank local_rank global_rank",
    "leave it out: ranks meet at MASTER_ADDR and MASTER_PORT, or at cluster.main_address of cluster=manual": (
        "init_method dist_url"
    ),
    # Strategies and their options
    "strategy=ddp": "ddp distributed strategy=horovod strategy=dist strategy=distributed strategy=ddp2 zero_stage=0",
    "strategy=ddp, which lightswitch.train runs in a notebook, too": "strategy=ddp_notebook",
    "strategy=ddp_spawn": "strategy=mp_spawn strategy=spawn",
    "strategy=ddp_spawn, as a forked process can't use CUDA if its parent has": "strategy=ddp_fork",
    "strategy=ddp, which starts a process for each device; Lightning no longer supports DataParallel": "strategy=dp "
    "strategy=data_parallel strategy=dataparallel data_parallel dataparallel",
    "strategy=ddp, which averages gradients without a parameter server": "strategy=ps strategy=parameter_server",
    "strategy=ddp trainer.devices=N": "trainer=ddp",
    "strategy=ddp trainer.devices=2 trainer.accelerator=cpu": "trainer=ddp_sim",
    **{
        f"strategy={ours} trainer.strategy.find_unused_parameters={flag}": " ".join(
            f"strategy={word}_find_unused_parameters_{flag}" for word in theirs
        )
        for ours, theirs in {"ddp": ("ddp", "ddp_notebook"), "ddp_spawn": ("ddp_spawn", "ddp_fork")}.items()
        for flag in ("false", "true")
    },
    "strategy=ddp trainer.strategy.find_unused_parameters={value}": "find_unused_parameters ddp_find_unused_parameters",
    "strategy=ddp trainer.strategy.broadcast_buffers={value}": "broadcast_buffers ddp_broadcast_buffers",
    "strategy=fsdp": "fsdp strategy=full_shard strategy=fsdp_full strategy=fsdp_native",
    "strategy=fsdp, which is FSDP2": "strategy=fsdp2 strategy=fsdp1",
    "strategy=fsdp trainer.strategy.sharding_strategy={value}": "sharding_strategy fsdp_sharding_strategy",
    "strategy=fsdp, or strategy=fsdp_tp for tensor parallelism": "strategy=model_parallel",
    "strategy=fsdp_grad_op": "strategy=shard_grad_op strategy=ddp_sharded strategy=fairscale",
    "strategy=fsdp_hybrid": "strategy=hsdp strategy=hybrid_shard",
    "strategy=fsdp_offload": "strategy=fsdp_cpu_offload cpu_offload fsdp_offload_params",
    "leave it out": "cpu_offload=false sync_dist=false plan.disk_gb_per_second",
    "strategy=fsdp_tp": "strategy=tp strategy=tensor_parallel",
    "strategy=single": "strategy=none strategy=single_gpu strategy=single_device",
    "trainer.accelerator=gpu or cpu; TPUs are not supported": "strategy=tpu strategy=xla",
    "trainer.strategy.units": "auto_wrap_policy fsdp_transformer_layer_cls_to_wrap",
    "trainer.strategy.activation_checkpointing": "gradient_checkpointing activation_checkpointing",
    "strategy=fsdp_tp trainer.strategy.tensor_parallel_size={value}": "tensor_parallel_size tp_size",
    "trainer.strategy.activation_checkpointing=true trainer.strategy.units={value}": "activation_checkpointing_policy",
    "strategy=deepspeed_stage_1": "strategy=zero1 strategy=zero_1",
    "strategy=deepspeed_stage_2": "strategy=zero strategy=zero2 strategy=zero_2 zero deepspeed=true",
    "strategy=deepspeed_stage_3": "strategy=zero3 strategy=zero_3",
    "strategy=deepspeed_stage_{value}": "zero_stage zero_optimization.stage",
    "strategy=deepspeed_stage_2_offload": "offload_optimizer zero_optimization.offload_optimizer",
    "strategy=deepspeed_stage_3_offload": "offload_param zero_optimization.offload_param "
    "strategy=deepspeed_stage_3_offload_optimizer",
    "strategy=deepspeed_stage_3_offload, to the host's memory: offloading to disk is not supported": "nvme_path "
    "strategy=deepspeed_stage_2_offload_nvme strategy=deepspeed_stage_3_offload_nvme",
    "strategy=deepspeed trainer.strategy.config={value}": "deepspeed deepspeed_config deepspeed_config_file ds_config",
    # Numbers
    "precision": "dtype mixed_precision",
    "precision=NAME, in a plan for each": "plan.precisions",
    "precision=bf16-mixed": "bf16 precision=bf16 precision=bfloat16 precision=amp_bf16 precision=true",
    "precision=16-mixed": "fp16 amp use_amp precision=16 precision=fp16 precision=float16 precision=half "
    "precision=amp precision=mixed",
    "precision=32-true": "precision=32 precision=fp32 precision=float32 precision=full precision=no precision=false",
    "precision=64-true": "precision=64 precision=fp64 precision=float64 precision=double",
    "matmul_precision=high": "tf32 allow_tf32",
    "compile=true": "model.compile model.torch_compile",
    "compile": "torch_compile",
    # Checkpoints and callbacks
    "callbacks.last_checkpoint.every_n_steps": "save_steps save_every save_interval checkpoint_every "
    "every_n_train_steps checkpointing_steps",
    "callbacks.last_checkpoint.keep": "save_total_limit checkpoints_total_limit",
    "callbacks.best_checkpoint.monitor": "monitor metric_for_best_model",
    "callbacks.best_checkpoint.save_top_k": "save_top_k",
    "callbacks.best_checkpoint.": "callbacks.checkpoint. callbacks.model_checkpoint.",
    "callbacks=[default,early_stopping]": "early_stopping early_stop",
    "callbacks=[default,early_stopping] callbacks.early_stopping.patience={value}": "patience early_stopping_patience",
    "callbacks=[default,grad_norm]": "trainer.track_grad_norm",
    "callbacks=[default,model_summary]": "trainer.weights_summary",
    "callbacks=checkpoint, which writes checkpoints and nothing else": "callbacks=none",
    "callbacks=checkpoint": "callbacks=model_checkpoint",
    "callbacks=default, which shows the progress": "callbacks=rich_progress_bar",
    "~callbacks.progress to hide the progress line": "callbacks.rich_progress_bar",
    "resume": "resume_from resume_from_checkpoint load_checkpoint",
    "run_id=NAME, which goes on from its newest checkpoint each time; or resume={value}": "snapshot_path",
    "ckpt_path": "checkpoint checkpoint_path",
    "init_from": "pretrained load_weights finetune_from",
    "model.pretrained={value}, of a model that takes a name of transformers": "model_name_or_path",
    # The run
    "seed": "random_seed manual_seed seed_everything",
    "mode": "stage",
    "mode=fit": "do_train",
    "mode=validate ckpt_path=PATH": "eval do_eval",
    "mode=predict ckpt_path=PATH": "do_predict",
    "mode=test ckpt_path=PATH": "config=eval",
    "leave it out: it is config.yaml": "config=train",
    "mode=test ckpt_path=PATH to only run a test": "train",
    "trainer.limit_test_batches=0 to fit without a test, or mode=test ckpt_path=PATH to only run a test": "test",
    "experiment": "recipe hparams_search",
    "debug=one_batch": "debug=fdr debug=fast_dev_run debug=default",
    "run_id": "version run_name",
    "name": "experiment_name exp_name task_name project project_name",
    "hydra.run.dir": "output_dir save_dir log_dir logging_dir",
    _PLACE: "paths work_dir original_work_dir root_dir",
    "logger": "report_to",
    "logger=wandb": "wandb wandb_log",
    "logger=[default,wandb]": "logger=many_loggers",
    _ONLY_CSV: "logger=none logger=false",
    "data": "datamodule",
    "data.": "datamodule.",
    _DATA: "data_dir paths.data_dir",
    "objective": "optimized_metric",
    "hydra/sweeper=optuna as well": "hydra.sweeper.n_trials",
    "python -m lightswitch.compare runs/NAME/RUN_ID after the sweep, which prints this command": "compare",
    AT_ONCE: "hydra/launcher=submitit_slurm hydra/launcher=submitit_local hydra/launcher=joblib hydra/launcher=ray",
    f"{_OVER}; tags=[a,b] to mark a run": "extras",
    _OVER: "print_config extras.print_config",
    "PYTHONWARNINGS=ignore before python": "ignore_warnings extras.ignore_warnings",
    "tags=[a,b], which is optional": "enforce_tags extras.enforce_tags",
    "--config-dir=FOLDER, a folder with configs for this machine": "local",
}
_TYPED = {word: typed for typed, words in _WORDS.items() for word in words.split()}
_KEY = re.compile(r"[\w.]+")
_OPEN = ("", "trainer", "trainer.strategy")  # nodes in which others' words are keys of any node


def instead(key: str, value: str = "VALUE") -> str | None:
    """Return what to type for another framework's key and value, or its `group=choice`; None if it is unknown.

    `gpus=2` is trainer.devices=2, and `callbacks.model_checkpoint.monitor=a` is callbacks.best_checkpoint.monitor=a.
    """
    typed = _found(_word(key), value)
    if typed and _KEY.fullmatch(typed):
        typed = _TYPED.get(_word(f"{typed}={value}"), f"{typed}={value}")  # mixed_precision=bf16 is bf16-mixed
    return typed and typed.replace("{value}", value)


def advice(text: str) -> str:
    """Return a sentence without its first capital: type what `instead` has found, or leave it out."""
    return text if text.startswith("leave ") else f"type {text}"


def _word(text: str) -> str:
    return text.lower().replace("-", "_")


def _found(key: str, value: str) -> str | None:
    """Return what the table has for a key with this value, the key, its last name, or a node above it."""
    node, _, name = key.rpartition(".")
    words = (key, name) if node in _OPEN and "=" not in key else (key,)
    for word in (*(_word(f"{word}={value}") for word in words), *words):
        if word in _TYPED:
            return _TYPED[word]
    while node and "=" not in key:
        if f"{node}." in _TYPED:
            return _TYPED[f"{node}."] + key[len(node) + 1 :]
        if (typed := _TYPED.get(node)) and not _KEY.fullmatch(typed):
            return typed
        node = node.rpartition(".")[0]
    return None


def names(key: str) -> tuple[str, ...]:
    """Return the names of a config key in other frameworks."""
    return tuple(word for typed, words in _WORDS.items() for word in words.split() if typed.partition("=")[0] == key)


def setting(name: str) -> str | None:
    """Return the config key for another framework's name, with or without its node; None if there is none.

    `lr` and `optimizer.learning_rate` are optimizer.lr, `trainer.gpus` is trainer.devices.
    """
    key = _TYPED.get(_word(name.rpartition(".")[2]), "")
    return key if _KEY.fullmatch(key) else None


def argument(node: str, name: str, accepted: Iterable[str]) -> str | None:
    """Return the argument of a node's code for another framework's name; None unless the code accepts the argument."""
    key = setting(name)
    group, _, argument = (key or "").rpartition(".")
    return argument if group in (node, node.rpartition(".")[2]) and argument in accepted else None


def choice(group: str, name: str) -> str | None:
    """Return a group's choice for another framework's name; None if there is none."""
    found = re.fullmatch(rf"{group}=([\w.-]+)", _TYPED.get(_word(f"{group}={name}"), ""))
    return found[1] if found else None
