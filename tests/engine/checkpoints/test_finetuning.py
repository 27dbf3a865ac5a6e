"""What Lightning's BaseFinetuning adds to an optimizer. Runs with it: strategies/test_module_shapes.py, Unfreezing."""

from __future__ import annotations

from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn
from torch.optim import SGD

from lightswitch.checkpoints.finetuning import follow_strategy


def test_a_layer_that_begins_as_another_is_unfrozen_and_none_is_added_twice() -> None:
    head, backbone = nn.LayerNorm(2), nn.LayerNorm(2)
    optimizer = SGD(head.parameters(), lr=0.1)
    callback = BackboneFinetuning()
    follow_strategy([callback])
    for _ in range(2):
        callback.unfreeze_and_add_param_group([head, backbone], optimizer)
    assert [list(map(id, group["params"])) for group in optimizer.param_groups] == [
        list(map(id, layer.parameters())) for layer in (head, backbone)
    ]
