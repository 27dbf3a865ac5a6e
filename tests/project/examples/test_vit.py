"""The vision transformer."""

import pytest
import torch
import torch.nn.functional as F

from project.data.digits import Digits
from project.models.vit import patches


def images(batch: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, 1, 8, 8, generator=generator), torch.arange(batch) % 3


def test_patches_follow_each_other_row_by_row():
    image = torch.arange(16.0).reshape(1, 1, 4, 4)
    assert patches(image, 2, margin=0)[0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]


def test_a_patch_sees_the_margin_around_it():
    image = torch.arange(16.0).reshape(1, 1, 4, 4)
    top_left = patches(image, 2, margin=1)[0, 0].reshape(4, 4)
    assert torch.equal(top_left, F.pad(image[0, 0, :3, :3], (1, 0, 1, 0)))


@pytest.mark.parametrize("options", [{}, {"norm": "rms", "mlp": "swiglu", "gradient_checkpointing": True}])
def test_it_learns_a_batch(vit, options):
    model = vit(init_std=0.2, **options)
    optimizer = model.configure_optimizers()
    first = model.training_step(images(), 0)
    for _ in range(30):
        loss = model.training_step(images(), 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.2 * first


def test_attention_looks_in_both_directions(vit):
    model, (batch, _) = vit(init_std=0.2).eval(), images()
    patchwise = model.transformer(model.patches(patches(batch, 4, 2)))
    changed = batch.clone()
    changed[:, :, 6:, 6:] += 1  # the last patch's own corner
    assert not torch.allclose(model.transformer(model.patches(patches(changed, 4, 2)))[:, 0], patchwise[:, 0])


def test_predictions_are_probabilities(vit):
    probabilities = vit().predict_step(images(), 0)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(6))


def test_patches_that_do_not_divide_the_image_are_refused(vit):
    with pytest.raises(ValueError, match=r"8 × 8 does not divide into 3 patches a side; use .* 1, 2, 4, 8"):
        vit(patches_per_side=3)


def test_images_of_another_size_are_refused(vit):
    with pytest.raises(ValueError, match=r"shape \(1, 1, 28, 28\); expected grey images \(batch, 1, 8, 8\)"):
        vit()(torch.zeros(1, 1, 28, 28))


def test_it_reads_digits_with_a_stock_trainer(vit, trainer):
    torch.manual_seed(0)
    model, data = vit(patches_per_side=4, classes=10, layers=1, width=32, heads=2, init_std=0.1), Digits(image_size=8)
    run = trainer(max_steps=200)
    run.fit(model, data)
    (tested,) = run.test(model, data, verbose=False)
    assert tested["test/accuracy"] > 0.9
    assert run.callback_metrics.keys() == {"test/loss", "test/accuracy"}
    assert sum(map(len, run.predict(model, data))) == 360
