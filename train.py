"""Train a model: one run, any strategy.

python train.py                                          # one process, real data, under a minute
python train.py strategy=ddp trainer.devices=2           # the same run over two processes
python train.py run_id=mine                              # run again, it resumes where it stopped
python train.py mode=plan trainer.devices=8 plan.device=h100  # what memory and time it would take
python train.py mode=dry_run trainer.num_nodes=128 trainer.devices=8 dry_run.rank=517  # what its ranks would do
python train.py mode=test ckpt_path=runs/gpt/mine/checkpoints/best.ckpt
sbatch slurm/multinode.sh strategy=ddp
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    from lightswitch.launch.entry import entry
except ModuleNotFoundError as error:  # the virtual environment is not active
    raise SystemExit(f"error: {error}; type source .venv/bin/activate, or make train, which sets it up") from None

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from lightswitch.context import RunContext


@entry(config_path="conf", config_name="config")
def main(cfg: DictConfig, run: RunContext) -> None:
    from lightswitch.preflight.check import check
    from lightswitch.runs import claim, resume

    batch = check(cfg, run)  # reports problems before torch is imported
    if resume.is_finished(cfg, run):
        return
    claim.take(cfg, run)  # lock the run directory against other processes

    if cfg.mode == "check":
        from lightswitch.launch import promises

        return promises.check(cfg, run)

    from lightning.pytorch import seed_everything

    from lightswitch.launch import auto, build, report, stages

    batch = auto.decide(cfg, run, batch)  # replace `auto` for the strategy and the micro-batch size
    seed_everything(cfg.seed, workers=True, verbose=False)  # the same initial weights on every rank
    if cfg.mode == "plan":
        from lightswitch.launch import plan

        return plan.plan(cfg, run)
    if cfg.mode == "dry_run":
        from lightswitch.launch import dry_run

        return dry_run.dry_run(cfg, run)
    start = resume.find(cfg, run)
    model, data, trainer = build.build(cfg, run, batch, start)
    report.begin(cfg, run, trainer, batch, start)

    if cfg.mode == "fit":
        metrics = stages.fit(run, model, data, trainer, start.path)
        metrics |= stages.test_best(run, model, data, trainer)
    else:
        metrics = stages.evaluate(run, model, data, trainer, start.path)
    report.end(cfg, run, trainer, metrics)


if __name__ == "__main__":
    main()
