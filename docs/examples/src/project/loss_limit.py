"""Ends a run whose loss has left all bounds."""

from lightning.pytorch import Callback, LightningModule, Trainer

from lightswitch.errors import Refused


class LossLimit(Callback):
    """Ends the run at the first logged step whose loss is above a limit."""

    def __init__(self, highest: float) -> None:
        self.highest = highest

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        loss = trainer.callback_metrics.get("train/loss")
        if loss is not None and loss > self.highest:
            raise Refused(f"train/loss is {loss:g} at step {trainer.global_step}; use a smaller optimizer.lr")
