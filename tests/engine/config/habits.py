"""What users of lightning-hydra-template type, and the line that says the name here.

Those that work: launch/habits.py.
"""

LINES = {
    "optimizer.lr=0.01": "optimizer.lr: PlainModel takes no optimizer; its own: model.lr, model.width, model.dropout, "
    "model.eps, model.halved",
    "scheduler=constant": "scheduler: PlainModel takes no scheduler; its own: model.lr, model.width, model.dropout, "
    "model.eps, model.halved",
    "lr=0.1": "lr: there is no such key. Did you mean model.lr?",
    "model.optimizer.lr=0.002": "model.optimizer: PlainModel takes no optimizer. Its own: model.width, model.lr, "
    "model.dropout, model.eps, model.halved",
    "callbacks.model_checkpoint.monitor=x": "callbacks.model_checkpoint: there is none; type "
    "callbacks.best_checkpoint.monitor=NAME, or callbacks.last_checkpoint.keep=N",
    "logger.aim.repo=x": "logger.aim names no class. For one of your own: logger.aim._target_=my.Class",
    "train=False": "train: there is no such key. Type mode=test ckpt_path=PATH for a test alone",
    "test=False": "test: there is no such key. Type trainer.limit_test_batches=0 for a fit without a test, or "
    "mode=test ckpt_path=PATH for a test alone",
    "optimized_metric=val/acc": "optimized_metric: there is no such key. Type objective=NAME",
    "model.compile=true": "model.compile: PlainModel takes no compile; type compile=true",
    "trainer.tpu_cores=8": "trainer.tpu_cores: Trainer takes no tpu_cores; type trainer.devices=N; there is no "
    "strategy for TPUs here",
    "hydra.verbose=true": "hydra.verbose=true: Hydra writes no log here; type --info all for what it composes, or "
    "--cfg job for the config",
    "callbacks=none": "callbacks=none: there is no such callbacks; type callbacks=checkpoint, which writes "
    "checkpoints and nothing else",
    "logger=none": "logger=none: there is no such logger; type logger=csv, which writes metrics.csv alone",
    "logger=many_loggers": "logger=many_loggers: there is no such logger; type logger=[default,wandb]",
    "callbacks=rich_progress_bar": "callbacks=rich_progress_bar: there is no such callbacks; type callbacks=default, "
    "which shows one",
    "tags=a": "tags=a: expected a list of words, as tags=[baseline,long]",
    "extras.print_config=true": "extras: there is no such key. Type --cfg job, which shows the config and starts "
    "nothing",
    "extras.ignore_warnings=true": "extras: there is no such key. Type PYTHONWARNINGS=ignore before python",
    "extras.enforce_tags=false": "extras: there is no such key. Type tags=[a,b], which may be left out",
    "extras=default": "extras: there is no such key. Type --cfg job, which shows the config and starts nothing; "
    "tags=[a,b] for what compare shows",
    "print_config=true": "print_config: there is no such key. Type --cfg job, which shows the config and starts "
    "nothing",
    "ignore_warnings=true": "ignore_warnings: there is no such key. Type PYTHONWARNINGS=ignore before python",
    "paths.data_dir=/data": "paths: there is no such key. Type the argument that the data have for it, which --help "
    "data lists",
    "paths.log_dir=/data": "paths: there is no such key. Type name=NAME run_id=RUN_ID, whose folder is "
    "runs/NAME/RUN_ID, or hydra.run.dir=FOLDER",
    "paths=default": "paths: there is no such key. Type name=NAME run_id=RUN_ID, whose folder is runs/NAME/RUN_ID, or "
    "hydra.run.dir=FOLDER",
    "work_dir=/x": "work_dir: there is no such key. Type name=NAME run_id=RUN_ID, whose folder is runs/NAME/RUN_ID, "
    "or hydra.run.dir=FOLDER",
    "datamodule.batch_size=3": "datamodule: there is no such key. Type data=NAME, or data.NAME=VALUE",
    "datamodule=mnist": "datamodule: there is no such key. Type data=NAME, or data.NAME=VALUE",
    "--config-name=eval": "--config-name=eval: there is no such config; type mode=test ckpt_path=PATH",
    "local=default": "local: there is no such key. Type --config-dir=FOLDER, which has configs of this machine",
    "hparams_search=mnist_optuna": "hparams_search: there is no such key. Did you mean experiment?",
}
# What those lines say to type, where it is no placeholder
INSTEAD = (
    *("tags=[a,b]", "objective=val/acc", "compile=true", "trainer.limit_test_batches=0", "logger=csv"),
    *("callbacks=[default,early_stopping]", "callbacks.best_checkpoint.monitor=val/loss", "name=mine"),
    *("callbacks.last_checkpoint.keep=3", "callbacks.lr_monitor.logging_interval=step", "model.lr=0.1"),
)
