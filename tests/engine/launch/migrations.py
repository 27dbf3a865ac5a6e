"""Rows of the tables in docs/your-own-code.md and docs/fork.md, each with the tests of the words on its right."""

from __future__ import annotations

import os

import torch
from lightning.pytorch.callbacks import ProgressBar

from lightswitch.checkpoints.last import LastCheckpoints
from lightswitch.monitoring.monitored import EarlyStop
from lightswitch.strategies.units import Compilation
from tests.engine.launch.migration_runs import (
    Elsewhere,
    Habit,
    Inside,
    Left,
    Shown,
    classes_of,
    logged_steps,
    of_callbacks,
    of_groups,
    of_trainer,
    rates_at,
    run_path,
    samples,
    tells,
)

_TUNED = Elsewhere(
    "project/examples/test_hf.py", "test_a_tuned_model_is_killed_resumed_under_other_strategies_and_given_back"
)
_LOGGED = (
    Elsewhere("engine/monitoring/test_loggers.py", "test_wandb_runs_offline"),
    Elsewhere("engine/monitoring/test_loggers.py", "test_wandb_without_a_key_is_told_in_a_line"),
)
_BEST = Elsewhere("engine/launch/test_choices.py", "test_the_best_checkpoint_is_tested_and_not_the_last_weights")
_COMPILED = Elsewhere(
    "nightly/strategies/test_compilation.py", "test_a_compiled_run_is_the_eager_one_under_every_strategy"
)
_REPLICAS = Elsewhere("engine/test_same_run.py", "test_a_switch_keeps_samples_losses_metrics_and_weights")
_ON_DEVICES = Elsewhere("engine/launch/test_commands.py", "test_what_a_run_says_to_type_next_can_be_pasted")

_MODULE = {
    "logs `val_loss`, or any one metric of validation": [
        Habit("a loss named val_loss"),
        Habit("accuracy alone"),
        Habit("a monitor that is typed"),
    ],
    "logs a name on some devices alone, as for classes that a batch has": [
        Elsewhere("engine/batches/test_metrics.py", "test_what_is_logged_is_the_same_at_any_world_size"),
    ],
    "splits its samples at random in `setup`": [
        Elsewhere("engine/batches/test_drawn.py", "test_a_split_that_is_drawn_in_setup_is_one"),
    ],
    "has a sampler of its own": [
        Elsewhere("engine/batches/test_sampling.py", "test_a_generator_of_a_samplers_own_follows_seed_and_epoch"),
        Elsewhere("engine/batches/test_sampling.py", "test_a_sampler_that_deals_out_shares_gives_all_of_them"),
    ],
    "has a batch sampler of its own": [
        Elsewhere(
            "engine/test_same_run.py",
            "test_the_batches_of_a_batch_sampler_are_cut_and_the_run_is_the_same_after_a_resume",
        ),
        Elsewhere("engine/test_same_run.py", "test_a_loader_that_splits_itself_runs_as_it_is_and_the_run_says_so"),
    ],
    "draws random numbers in its hooks": [
        Elsewhere("engine/batches/test_drawn.py", "test_what_hooks_draw_follows_the_position"),
    ],
    "calls `self.all_gather`": [
        Elsewhere("engine/strategies/test_gathering.py", "test_shorter_shares_are_filled_with_their_last_row"),
    ],
    "optimizes by hand, with several optimizers": [
        Habit("two optimizers by hand"),
        Habit("no clipping by hand"),
        Habit("a GAN under ddp"),
        Elsewhere("engine/strategies/test_refused.py", "test_of_modules"),
    ],
    "clips in `configure_gradient_clipping`": [
        Elsewhere("engine/strategies/test_refused.py", "test_of_modules"),
        Elsewhere(
            "engine/launch/test_build.py",
            "test_a_module_that_clips_itself_is_handed_no_value_that_nobody_typed",
            "strategy={strategy}",
        ),
        Elsewhere("engine/launch/test_build.py", "test_a_module_that_clips_itself_is_handed_the_value_that_is_typed"),
    ],
    "is a GAN, whose losses reach a part of the parameters each": [
        Habit("a GAN under ddp"),
    ],
    "has parameters that take no part in some step": [
        Elsewhere(
            "engine/strategies/test_ddp.py",
            "test_unused_parameters_are_found_where_that_is_asked_for",
            "find_unused_parameters",
        )
    ],
    "has a ReduceLROnPlateau": [
        Habit("ReduceLROnPlateau"),
        Habit("ReduceLROnPlateau validates"),
        Habit("val_check_interval in steps"),
    ],
    "says nothing of when it is validated": [
        Inside(
            "steps", lambda seen: [seen.trainer.val_check_batch, seen.trainer.check_val_every_n_epoch], [250, None], ""
        ),
        Inside("epochs", of_trainer("val_check_interval", "check_val_every_n_epoch", "max_steps"), [1.0, 1, -1]),
        Habit("fewer steps than the default between validations"),
    ],
    "takes its batch size as `batch_size`": [
        Inside("epochs", samples, [16, 128]),
        Inside("steps", samples, [64, 64], ""),
        Elsewhere("engine/launch/test_habits.py", "test_a_batch_size_that_data_bring_along_is_that_of_a_step"),
    ],
    "keeps a copy or an average of its weights by hand, clips them, sets them from the first batch": [
        Elsewhere("engine/strategies/test_writes.py", "test_what_is_written_is_as_in_one_process"),
        Elsewhere(
            "engine/strategies/test_writes.py",
            "test_weights_set_from_the_first_batch_are_those_of_one_process_in_the_same_micro_batches",
        ),
    ],
    "reads or logs norms, histograms or numbers of its weights and gradients in hooks, or clips by them": [
        Elsewhere(
            "engine/strategies/test_reads.py", "test_a_module_that_trains_by_what_it_reads_trains_as_in_one_process"
        ),
        Elsewhere("engine/strategies/test_reads.py", "test_reads_are_those_of_one_process"),
    ],
    "freezes or unfreezes layers while it trains": [
        Elsewhere(
            "engine/strategies/test_module_shapes.py",
            "test_a_shape_trains_resumes_tests_and_exports_as_in_one_process",
        ),
    ],
    "has no `test_step`": [
        Habit("a module without test_step"),
        Elsewhere("engine/launch/test_choices.py", "test_a_checkpoint_is_evaluated_as_it_was_in_training"),
    ],
    "is trained by epochs": [
        Inside("epochs", of_trainer("max_epochs"), [10]),
        Inside("epochs", rates_at(0, 1, 20), [0.0015, 0.003, 0.0003]),  # of 10 epochs of two steps
    ],
    "has a batch norm": [
        Habit("a batch norm on two devices"),
        Habit("trainer.sync_batchnorm on CPUs"),
    ],
    "has weights elsewhere": [
        Elsewhere("engine/checkpoints/test_portable.py", "test_a_run_can_start_from_the_weights_alone"),
        Elsewhere("engine/checkpoints/test_foreign.py", "test_a_run_starts_from_those_that_fit_and_tells_the_others"),
    ],
    "reads an IterableDataset": [
        Elsewhere(
            "engine/batches/test_stream_runs.py",
            "test_a_stream_that_splits_itself_by_ranks_is_refused_until_that_is_declared",
        )
    ],
}
_TEMPLATE = {
    "`trainer=gpu`": [
        Elsewhere("engine/preflight/test_devices.py", "test_devices_are_counted_by_the_accelerator_in_use", "gpu"),
        Elsewhere("engine/test_same_run.py", "test_a_deterministic_run_resumes_to_the_bit_on_a_gpu"),
    ],
    "`trainer=ddp trainer.devices=4`": [_REPLICAS, _ON_DEVICES],
    "`trainer=mps`": [
        Elsewhere("engine/preflight/test_devices.py", "test_devices_are_counted_by_the_accelerator_in_use", "mps")
    ],
    "`data.batch_size=64`": [Inside("template", samples, [64, 64])],
    "`trainer.min_epochs=5 trainer.max_epochs=20`": [
        Inside("template", of_trainer("max_epochs"), [20]),
        Left("template", logged_steps, 10),  # of two an epoch, as it is told after the first one to stop
    ],
    "`model.optimizer.lr=0.002`": [Inside("template", of_groups("initial_lr"), [[0.002], [0.002]])],
    "`-m hparams_search=mnist_optuna`": [
        Elsewhere("engine/sweeps/test_sweeps.py", "test_optuna_samples_once_for_all_ranks_and_goes_on_as_before")
    ],
    "`extras.print_config=true`": [
        Elsewhere("engine/config/test_hydra_errors.py", "test_a_config_can_be_shown_without_a_run")
    ],
    "`data.num_workers=4`": [Inside("template", lambda seen: seen.trainer.train_dataloader.num_workers, 4)],
    "`callbacks=default`, `callbacks=none`": [Inside("template", of_callbacks(ProgressBar), [])],
    "`logger=wandb`": [*_LOGGED],
    "`experiment=example`": [
        Inside("fashion", classes_of("lightning_module", "datamodule"), ["VisionTransformer", "FashionMNIST"]),
        Inside("fashion", of_trainer("max_steps", "val_check_batch"), [8600, 860]),
    ],
    "`debug=fdr`": [
        Elsewhere(
            "engine/launch/test_choices.py", "test_one_batch_runs_every_stage_and_leaves_no_checkpoint", "one_batch"
        )
    ],
    "`debug=overfit`, `debug=limit`, `debug=profiler`": [
        Elsewhere("engine/launch/test_choices.py", "test_overfit_reads_the_same_samples_over_and_over", "overfit"),
        Elsewhere("engine/launch/test_choices.py", "test_limit_cuts_every_stage_short", "limit"),
        Elsewhere("engine/launch/test_choices.py", "test_profiler_leaves_a_table_in_the_run_directory", "profiler"),
    ],
    "`ckpt_path=PATH` in training": [Habit("ckpt_path=PATH"), Habit("ckpt_path=last")],
    "`eval.py` with `ckpt_path=PATH`": [
        Elsewhere("engine/launch/test_choices.py", "test_a_checkpoint_is_evaluated_as_it_was_in_training")
    ],
    "`Net.load_from_checkpoint(PATH)`": [
        Elsewhere("engine/config/test_habits.py", "test_a_run_is_loaded_by_its_file_and_tells_no_file_that_it_has_not")
    ],
    "`task_name=mine`": [Left("template", lambda run: run.run_dir.parent.name, "mine")],
    "`+trainer.gradient_clip_val=0.5`": [Inside("template", lambda seen: round(seen.gradient_norm, 4), 0.5)],
    "`trainer.detect_anomaly=true`": [Inside("template", lambda seen: torch.is_anomaly_enabled(), True)],
    "`compile=true`": [_COMPILED],
    "`seed=12345`": [Inside("template", lambda seen: os.environ["PL_GLOBAL_SEED"], "12345")],
}
_TRANSFORMERS = {
    "`learning_rate`, `weight_decay`": [
        Inside("transformers", of_groups("initial_lr", "weight_decay"), [[5e-5, 0.01], [5e-5, 0.0]])
    ],
    "`per_device_train_batch_size=8`": [Inside("transformers", lambda seen: len(seen.batch[0]), 8)],
    "`gradient_accumulation_steps`": [Inside("transformers", of_trainer("accumulate_grad_batches"), [8])],
    "`num_train_epochs=3`": [Habit("trainer.max_epochs alone")],
    "`max_steps=1000`": [Inside("transformers", of_trainer("max_steps", "max_epochs"), [1000, -1])],
    "`lr_scheduler_type=linear`, `warmup_ratio=0.1`": [
        Inside("transformers", rates_at(0, 100, 550, 1000), [round(5e-5 / 101, 8), 5e-5, 2.5e-5, 0.0])
    ],
    '`optim="adamw_torch"`, `adam_beta2=0.95`': [
        Inside("transformers", lambda seen: type(seen.trainer.optimizers[0]).__name__, "AdamW"),
        Inside("transformers", of_groups("betas"), [[[0.9, 0.95]]] * 2),
    ],
    "`max_grad_norm=1.0`": [Inside("transformers", lambda seen: round(seen.gradient_norm, 4), 1.0)],
    "`bf16=True`, `fp16=True`": [
        Inside("transformers", lambda seen: str(seen.dtype), "torch.bfloat16", "precision=bf16-mixed"),
        Elsewhere("engine/test_every_switch.py", "test_every_precision_trains_on_a_gpu"),
        Elsewhere(
            "engine/test_matrix.py",
            "test_a_request_is_accepted_or_refused_in_the_same_lines_by_any_launcher",
            "precision=",
        ),
    ],
    "`tf32=True`": [Inside("transformers", lambda seen: torch.get_float32_matmul_precision(), "high")],
    "`eval_steps=500`": [
        Inside(
            "transformers",
            lambda seen: [seen.trainer.val_check_batch / 8, seen.trainer.check_val_every_n_epoch],  # 8 are a step
            [500, None],
        )
    ],
    '`eval_strategy="epoch"`': [Habit("check_val_every_n_epoch")],
    "`auto_find_batch_size=True`": [
        Elsewhere("engine/launch/test_auto.py", "test_micro_batch_size_auto_is_the_largest_that_fits")
    ],
    "`gradient_checkpointing=True`": [
        Elsewhere("engine/strategies/test_fsdp.py", "test_it_is_the_run_of_one_process"),
        Elsewhere("project/examples/test_gpt.py", "test_gradient_checkpointing_gives_the_same_gradients"),
        Inside(
            "steps",
            lambda seen: seen.trainer.lightning_module.shape.gradient_checkpointing,
            True,
            "model=gpt model.gradient_checkpointing=true",
        ),
    ],
    "`dataloader_num_workers=4`": [Inside("transformers", lambda seen: seen.trainer.train_dataloader.num_workers, 4)],
    "`save_steps=500`, `save_total_limit=3`": [
        Inside("transformers", of_callbacks(LastCheckpoints, "every_n_steps", "keep"), [[500, 3]]),
        Elsewhere("engine/checkpoints/test_last.py", "test_those_to_keep_stay_for_ever"),
    ],
    "`logging_steps=10`": [Inside("transformers", lambda seen: seen.trainer.log_every_n_steps, 10)],
    "`load_best_model_at_end`": [_BEST],
    "`metric_for_best_model=accuracy`": [Habit("a monitor that is typed")],
    "`AutoModelForCausalLM.from_pretrained(NAME)`": [
        Elsewhere("project/examples/test_hf.py", "test_a_pretrained_model_has_its_own_logits"),
        _TUNED,
    ],
    "a `LoraConfig`": [
        Elsewhere("project/examples/test_hf.py", "test_only_adapters_train_and_only_they_are_given_to_the_optimizer"),
        _TUNED,
    ],
    "a dataset of text files": [_TUNED],
    "`save_pretrained`": [_TUNED],
    "`output_dir`, `run_name`": [Left("transformers", run_path, "runs/gpt/mine")],
    "`resume_from_checkpoint=True`": [Habit("a resume by hand")],
    "`report_to=wandb`": [*_LOGGED],
    "`seed=1`, `full_determinism`": [
        Inside("transformers", lambda seen: os.environ["PL_GLOBAL_SEED"], "1"),
        Inside("transformers", lambda seen: torch.are_deterministic_algorithms_enabled(), True),
    ],
    "`torch_compile=True`": [_COMPILED],
    '`fsdp="full_shard"`': [Elsewhere("engine/strategies/test_fsdp.py", "test_it_is_the_run_of_one_process")],
    "`deepspeed=ds_config.json`": [Elsewhere("engine/deepspeed/test_config.py", "test_a_run_trains_by_a_file")],
    "`EarlyStoppingCallback(3)`": [
        Inside("transformers", of_callbacks(EarlyStop, "patience"), [[3]]),
        Habit("early stopping, also when resumed"),
    ],
}
_NANOGPT = {
    "`train.py` with its config of GPT-2": [
        Inside("nanogpt_files", samples, [12, 480]),
        Inside("nanogpt_files", of_groups("initial_lr", "betas"), [[6e-4, [0.9, 0.95]]] * 2),
        Inside("nanogpt_files", of_trainer("max_steps", "precision"), [600_000, "bf16-mixed"]),
    ],
    "`train.bin`, `val.bin` in `data/openwebtext`": [
        Inside(
            "nanogpt_files",
            lambda seen: {split: path.as_posix() for split, path in seen.trainer.datamodule.files.items()},
            {
                **{split: f"data/openwebtext/{split}.bin" for split in ("train", "val")},
                "test": "data/openwebtext/val.bin",
            },
        ),
        Inside(
            "nanogpt_files",
            lambda seen: [getattr(seen.trainer.lightning_module.shape, name) for name in ("mlp", "bias")],
            ["gelu", True],  # as GPT-2 has them, and the default model has not
        ),
        Inside("nanogpt_files", lambda seen: bool((seen.batch[1] == (seen.batch[0] + 1) % 300).all()), True),
    ],
    "`prepare.py` of a dataset of your own": [
        Inside("shards", classes_of("lightning_module", "datamodule"), ["GPT", "TextShards"]),
        Inside("shards", lambda seen: seen.trainer.datamodule.decode(seen.batch[0][0, :3].tolist()), "aaa"),
        Elsewhere(
            "project/examples/test_text_shards.py",
            "test_a_mixture_has_the_curve_of_one_process_and_goes_on_under_another_strategy",
        ),
        Elsewhere("project/examples/test_text_shards.py", "test_packed_is_what_is_read"),
    ],
    "`batch_size=12`, `gradient_accumulation_steps=40`": [
        Inside("nanogpt_files", samples, [12, 480]),
        Inside("nanogpt_files", of_trainer("accumulate_grad_batches"), [40]),
    ],
    "`max_iters=2000`": [Inside("nanogpt", of_trainer("max_steps", "max_epochs"), [2000, -1])],
    "`learning_rate=1e-3`, `beta2=0.99`": [
        Inside("nanogpt", of_groups("initial_lr", "betas"), [[1e-3, [0.9, 0.99]]] * 2)
    ],
    "`grad_clip=1.0`": [Inside("nanogpt", lambda seen: round(seen.gradient_norm, 4), 1.0)],
    "`eval_interval=250`, `eval_iters=200`": [
        Inside(
            "nanogpt", of_trainer("val_check_batch", "check_val_every_n_epoch", "limit_val_batches"), [250, None, 200]
        )
    ],
    "`n_layer=4`, `n_head=4`, `n_embd=128`, `block_size=64`": [
        Inside(
            "nanogpt",
            lambda seen: [getattr(seen.trainer.lightning_module.shape, name) for name in ("layers", "heads", "width")],
            [4, 4, 128],
        ),
        Inside("nanogpt", lambda seen: seen.batch[0].shape[1], 64),
    ],
    "`dtype=bfloat16`": [Inside("nanogpt", lambda seen: str(seen.dtype), "torch.bfloat16")],
    "`compile=False`": [Inside("nanogpt", of_callbacks(Compilation), [])],
    "`device=cpu`": [Inside("nanogpt", lambda seen: seen.batch[0].device.type, "cpu")],
    "`weight_decay=1e-1`, `dropout=0.2`": [
        Inside("nanogpt", of_groups("weight_decay"), [[0.1], [0.0]]),
        Inside("nanogpt", lambda seen: seen.trainer.lightning_module.shape.dropout, 0.2),
    ],
    "`warmup_iters=100`, `min_lr=1e-4`": [
        Inside("nanogpt", rates_at(0, 100, 2000), [round(1e-3 / 101, 8), 1e-3, 1e-4])
    ],
    "`decay_lr=False`": [
        Inside("steps", lambda seen: type(seen.trainer.lr_scheduler_configs[0].scheduler).__name__, "ConstantLR"),
        Elsewhere("engine/launch/test_choices.py", "test_a_constant_schedule_leaves_the_rate_as_it_is"),
    ],
    "`init_from=resume`": [Habit("a resume by hand")],
    "`init_from=gpt2`": [
        Inside(
            "nanogpt_files",
            lambda seen: round(seen.trainer.lightning_module.tokens.weight.mean().item(), 2),
            1.0,
        ),
        Elsewhere("project/examples/test_hf.py", "test_a_gpt_of_its_shape_is_a_gpt2_in_both_directions"),
    ],
    "`eval_only=True`": [Left("validated", tells("reads      runs/gpt/mine/checkpoints/last.ckpt, at step 1\n"), True)],
    "`sample.py`": [
        Left("transformers", tells(" of Python. "), True),
        Elsewhere("project/examples/test_gpt.py", "test_generation_continues_the_prompt_within_the_context"),
    ],
    "`wandb_log=True`": [*_LOGGED],
    "`torchrun --standalone --nproc_per_node=8 train.py`": [
        _REPLICAS,
        _ON_DEVICES,
        Elsewhere("nightly/launch/test_torchrun.py", "test_standalone_it_starts_one_run"),
    ],
}
ROWS: dict[str, dict[str, list[Shown]]] = {
    "I have a LightningModule": _MODULE,
    "I come from lightning-hydra-template": _TEMPLATE,
    "I come from transformers' Trainer": _TRANSFORMERS,
    "I come from nanoGPT": _NANOGPT,
}
