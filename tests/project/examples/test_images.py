"""Digits, Fashion-MNIST, and the vision transformer that reads them."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from project.data.digits import Digits
from project.data.fashion_mnist import FILES, FashionMNIST, read_idx
from project.data.folds import Folds
from project.data.images import Images
from project.models.vit import patches


def write_idx(file: Path, values: np.ndarray) -> None:
    content = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.astype(np.uint8).tobytes()
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    for name, stem in FILES.items():
        count = 24 if "train" in name else 10
        values = random.integers(0, 256, (count, 28, 28)) if "images" in name else np.arange(count) % 10
        write_idx(tmp_path / (f"{stem}.gz" if "labels" in name else stem), values)
    return tmp_path


def test_an_idx_file_is_read_as_written_and_one_that_is_cut_is_refused(tmp_path):
    values = np.arange(24).reshape(2, 3, 4)
    for name in ("plain", "zipped.gz"):
        write_idx(tmp_path / name, values)
        assert np.array_equal(read_idx(tmp_path / name), values)
    file = tmp_path / "images"
    file.write_bytes(b"<html>")
    with pytest.raises(ValueError, match="begins with 3c68746d; expected an IDX file"):
        read_idx(file)
    write_idx(file, values)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"holds 20 values for a shape of \(2, 3, 4\); fetch it again"):
        read_idx(file)


def test_fashion_mnist_splits_its_files(folder):
    data = FashionMNIST(str(folder), image_size=32)
    data.setup("fit")
    assert {split: len(images) for split, images in data.splits.items()} == {"train": 22, "val": 2, "test": 10}
    image, label = data.splits["val"][1]
    assert (image.shape, label.item()) == ((1, 32, 32), 23 % 10)
    expected = read_idx(folder / FILES["train images"])[23] / 255 * 2 - 1
    assert np.allclose(image[0, 2:-2, 2:-2], expected, atol=1e-6)
    assert (image[0, :2] == -1).all()


def test_missing_files_are_listed_at_once_with_what_to_fetch(folder):
    (folder / FILES["test labels"]).with_suffix(".gz").unlink()
    (folder / FILES["train images"]).unlink()
    with pytest.raises(FileNotFoundError) as error:
        FashionMNIST(str(folder), image_size=28)
    text = str(error.value)
    assert "has no train-images-idx3-ubyte.gz, t10k-labels-idx1-ubyte.gz; fetch them from https://" in text
    assert "dataset-fashion-mnist and type data.folder=/usr/share/datasets/fashion-mnist" in text


def test_a_batch_of_images_is_its_single_samples_stacked():
    images = Images(np.arange(5 * 16).reshape(5, 4, 4), np.arange(5), brightest=80, image_size=6)
    batch, labels = images.__getitems__([4, 1])
    assert batch.shape == (2, 1, 6, 6)
    for row, index in enumerate((4, 1)):
        assert torch.equal(images[index][0], batch[row])
        assert images[index][1] == labels[row] == index
    with pytest.raises(ValueError, match=r"images of 4 × 4, larger than data.image_size=3; use data.image_size=4"):
        Images(np.zeros((1, 4, 4)), np.zeros(1), brightest=1, image_size=3)


def test_the_digits_are_all_there_once_from_black_to_white():
    data = Digits(image_size=8)
    data.setup("fit")
    images = torch.cat([split.images for split in data.splits.values()])
    assert len(images) == 1797
    assert {split: len(part) for split, part in data.splits.items()} == {"train": 1257, "val": 180, "test": 360}
    batch, _ = next(iter(data.train_dataloader()))
    assert (batch.min(), batch.max()) == (-1, 1)


# The vision transformer


def images(batch: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, 1, 8, 8, generator=generator), torch.arange(batch) % 3


def test_patches_follow_each_other_row_by_row_and_see_the_margin_around_them():
    image = torch.arange(16.0).reshape(1, 1, 4, 4)
    assert patches(image, 2, margin=0)[0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    top_left = patches(image, 2, margin=1)[0, 0].reshape(4, 4)
    assert torch.equal(top_left, F.pad(image[0, 0, :3, :3], (1, 0, 1, 0)))


def test_it_learns_a_batch(vit):
    model = vit(init_std=0.2, norm="rms", mlp="swiglu", gradient_checkpointing=True)
    optimizer = model.configure_optimizers()
    first = model.training_step(images(), 0)
    for _ in range(30):
        loss = model.training_step(images(), 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.2 * first


def test_images_and_patches_that_do_not_fit_are_refused(vit):
    with pytest.raises(ValueError, match=r"8 × 8 does not divide into 3 patches a side; use .* 1, 2, 4, 8"):
        vit(patches_per_side=3)
    with pytest.raises(ValueError, match=r"shape \(1, 1, 28, 28\); expected grey images \(batch, 1, 8, 8\)"):
        vit()(torch.zeros(1, 1, 28, 28))


@pytest.mark.nightly
def test_it_reads_digits_with_a_stock_trainer(vit, trainer):
    torch.manual_seed(0)
    model, data = vit(patches_per_side=4, classes=10, layers=1, width=32, heads=2, init_std=0.1), Digits(image_size=8)
    run = trainer(max_steps=200)
    run.fit(model, data)
    (tested,) = run.test(model, data, verbose=False)
    assert tested["test/accuracy"] > 0.9
    assert run.callback_metrics.keys() == {"test/loss", "test/accuracy"}
    assert sum(map(len, run.predict(model, data))) == 360


def test_each_sample_is_validated_in_one_fold_and_trained_on_in_the_others():
    folds = Folds(range(11), folds=3)
    held_out = [[*val] for _, val in folds]
    assert sorted(sample for part in held_out for sample in part) == [*range(11)]
    assert all(sorted([*train, *val]) == [*range(11)] for train, val in folds)
    assert sorted(map(len, held_out)) == [3, 4, 4]
    with pytest.raises(ValueError, match=r"data\.folds is 12; expected 2 or more, and at most the 11 samples"):
        Folds(range(11), folds=12)
    with pytest.raises(ValueError, match=r"data\.fold is 5; expected 0 to 4, as data\.folds is 5"):
        Digits(image_size=8, fold=5)
