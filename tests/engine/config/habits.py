"""A hundred habits of lightning-hydra-template's users: what they type, with a module and data of its form.

tests/engine/tables/habits.py types each for docs/reference/habits.md; test_habits.py compares page and code.
"""

from __future__ import annotations

import shlex

from tests.engine.conftest import CHECKOUT

CONF = CHECKOUT / "tests/engine/config/template/conf"
MODEL_AND_DATA = ("model=mnist", "data=mnist")

# Beside train.py
COMMANDS = ("make test-full", "make clean-logs")
REFUSED = (
    "trainer=cpu",
    "trainer=gpu",
    "trainer=mps",
    "trainer=ddp trainer.devices=4",
    "trainer=ddp_sim trainer.devices=2",
    "+trainer.tpu_cores=8",
    "trainer.gpus=1",
    "+trainer.accumulate_grad_batches=10",
    "+trainer.auto_lr_find=true",
    "+trainer.auto_scale_batch_size=power",
    "+trainer.track_grad_norm=2",
    "trainer.weights_summary=full",
    "trainer.resume_from_checkpoint=x.ckpt",
    "trainer.progress_bar_refresh_rate=0",
    "trainer.strategy=ddp_find_unused_parameters_true",
    "trainer.default_root_dir=out",
    "trainer.logger=false",
    "debug=default",
    "debug=fdr",
    "logger=comet",
    "logger=many_loggers",
    "logger=none",
    "logger=null",
    "logger.wandb.project=x",
    "logger.aim.repo=x",
    "callbacks=none",
    "callbacks=null",
    "callbacks=early_stopping",
    "callbacks=model_checkpoint",
    "callbacks=rich_progress_bar",
    "callbacks.model_checkpoint.monitor=val/loss",
    "callbacks.early_stopping.patience=5",
    "callbacks.rich_progress_bar.refresh_rate=1",
    "~callbacks.early_stopping",
    "experiment=example",
    "ckpt_path=logs/train/runs/x/checkpoints/last.ckpt",
    "tags=mnist",
    "train=False",
    "test=False",
    "optimized_metric=val/acc_best",
    "task_name=mine",
    "extras=default",
    "extras.print_config=true",
    "extras.ignore_warnings=true",
    "extras.enforce_tags=false",
    "print_config=true",
    "ignore_warnings=true",
    "paths=default",
    "paths.data_dir=/data",
    "paths.log_dir=/data",
    "data_dir=/data",
    "work_dir=/x",
    "hydra=default",
    "hydra.verbose=true",
    "hydra/job_logging=colorlog",
    "hydra/launcher=joblib",
    "hydra.sweeper.n_trials=5",
    "hparams_search=mnist_optuna",
    "-m seed=1,2 hydra/launcher=joblib",
    "local=default",
    "datamodule=mnist",
    "datamodule.batch_size=3",
    "data=cifar",
    "model=resnet",
    "lr=0.1",
    "model.lr=0.002",
    "-m model.lr=0.001,0.0005",
    "model.optimizer.learning_rate=0.002",
    "model.net.lin5_size=128",
    "optimizer.lr=0.01",
    "optimizer=sgd",
    "scheduler=constant",
    "batch_size=32",
    "data.batch_size=32,64",
    "data.shuffle=true",
    "--config-name=eval",
    "--config-name=train.yaml",
    "mode=train",
)
WORKS = {  # and what it does
    "trainer.max_epochs=2": "two epochs",
    "trainer.min_epochs=1 trainer.max_epochs=2": "as there",
    "trainer.accelerator=cpu": "as there",
    "trainer.devices=1": "as there",
    "trainer.deterministic=True": "as there",
    "trainer.strategy=ddp": "the choice strategy=ddp",
    "+trainer.precision=bf16-mixed": "the choice precision=bf16-mixed",
    "+trainer.gradient_clip_val=0.5": "as there",
    "+trainer.val_check_interval=0.5": "validates twice an epoch",
    "+trainer.max_time=00:12:00:00": "as there",
    "+trainer.detect_anomaly=true": "as there",
    "+trainer.fast_dev_run=true": "one batch of each stage",
    "+trainer.limit_train_batches=0.2": "as there",
    "+trainer.overfit_batches=1": "as there",
    "+trainer.num_sanity_val_steps=0": "as there",
    "+trainer.enable_progress_bar=false": "no line of progress",
    "debug=limit": "a few batches of each stage",
    "debug=overfit": "the same batches again and again",
    "debug=profiler": "a profile, and the line that names its file",
    "debug=null": "as there",
    "logger=csv": "metrics.csv",
    "logger=tensorboard": "TensorBoard alone",
    "callbacks=default": "as there",
    "seed=12345": "as there",
    "tags=[mnist,experiment_x]": "tags of the run, shown by compare and loggers",
    "compile=false": "as there",
    "model.compile=true": "the module compiles its network, as there",
    "model.optimizer.lr=0.002": "the rate of the module's own optimizer",
    "model.optimizer._target_=torch.optim.SGD": "another class, with the same arguments",
    "model.scheduler=null": "no schedule",
    "model.net.lin1_size=128": "as there",
    "data.batch_size=32": "32 samples a step, on any number of devices",
    "data.num_workers=1": "as there",
    "data.train_val_test_split=[600,84,84]": "as there",
    "hydra.run.dir=out": "the run's folder",
    "-m data.batch_size=32,64 model.optimizer.lr=0.001,0.0005": "four runs, and a table of them",
}
# Typed in Python
LOADS = {
    'MNISTLitModule.load_from_checkpoint("runs/mnist/RUN_ID/model.ckpt")': "a file with the best weights, as each run "
    "has it at its end",
}


def words(typed: str) -> list[str]:
    """What a habit is as the arguments of train.py, with that model and data where it names no others."""
    own = shlex.split(typed)
    others = [word for word in MODEL_AND_DATA if not any(one.startswith(word.partition("=")[0] + "=") for one in own)]
    return ["--config-dir", str(CONF), *others, *own]
