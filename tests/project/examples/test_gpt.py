"""The GPT: what its options do, and that its outputs are what they claim."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from project.models import cross_entropy, document_attention
from project.models import gpt as gpt_module
from project.models.cross_entropy import LinearCrossEntropy
from project.models.gpt_plan import VocabularyParallel
from project.models.transformer import Linear, rotary, rotate, side_by_side
from tests.runs import context

OPTIONS = [
    {},
    {"norm": "rms", "mlp": "swiglu", "position": "rotary", "tied": False},
    {"norm": "layer", "mlp": "gelu", "position": "learned", "bias": True},
    {"dropout": 0.1, "gradient_checkpointing": True},
]


def windows(batch: int = 4, vocab_size: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(vocab_size, (batch, 9), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_later_token_changes_no_earlier_logits_and_the_loss_is_that_of_all(gpt, options):
    model = gpt(**options).eval()
    ids, _ = windows()
    changed = ids.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    before, after = model(ids), model(changed)
    torch.testing.assert_close(after[:, :5], before[:, :5])
    assert not torch.allclose(after[:, 5:], before[:, 5:])
    loss = F.cross_entropy(before.flatten(0, 1), windows()[1].flatten())
    torch.testing.assert_close(model.loss(windows()), loss)


@pytest.mark.parametrize("options", OPTIONS)
def test_every_kind_of_block_learns_a_batch(gpt, options):
    model = gpt(**options)
    optimizer = model.configure_optimizers()
    first = model.loss(windows())
    for _ in range(30):
        loss = model.loss(windows())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.5 * first


def test_rotary_scores_depend_on_the_distance_alone():
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    rotation = rotary(32, 8, like=q)
    turned = rotate(torch.stack([q, k])[:, None].expand(2, 32, 8), rotation)  # (2, time, head)
    scores = turned[0] @ turned[1].T
    torch.testing.assert_close(scores[3, 1], scores[27, 25])
    torch.testing.assert_close(scores[0, 0], q @ k)
    assert not torch.isclose(scores[3, 1], scores[3, 2])
    torch.testing.assert_close(rotary(1024, 8, like=q.bfloat16()), rotary(1024, 8, like=q))  # exact in 16 bits


def test_gradient_checkpointing_gives_the_same_gradients(gpt):
    plain, checkpointed = (gpt(dropout=0.2, gradient_checkpointing=on) for on in (False, True))
    for model in (plain, checkpointed):
        torch.manual_seed(3)
        model.loss(windows()).backward()
    for (name, p), q in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)


def test_a_tied_head_is_the_embedding(gpt):
    tied, untied = gpt(), gpt(tied=False)
    assert not [name for name in tied.state_dict() if "head" in name]
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters()) == 11 * 16
    with torch.no_grad():
        tied.tokens.weight[4] = 0
    assert (tied(windows()[0])[..., 4] == 0).all()


def test_only_matrices_of_linear_layers_and_embeddings_decay(gpt):
    model = gpt(bias=True, position="learned", tied=False)
    optimizer = model.configure_optimizers()
    names = {id(p): name for name, p in model.named_parameters()}
    decaying, others = ({names[id(p)] for p in group["params"]} for group in optimizer.param_groups)
    assert decaying | others == set(names.values())
    assert others == {name for name in names.values() if name.endswith("bias") or "norm" in name}
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]


def test_generation_continues_the_prompt_within_the_context(gpt):
    model, (ids, _) = gpt().eval(), windows()
    text = model.generate(ids, 12, top_k=3, generator=torch.Generator().manual_seed(0))
    again = model.generate(ids, 12, top_k=3, generator=torch.Generator().manual_seed(0))
    assert text.shape == (4, 20)
    assert torch.equal(text, again)
    assert torch.equal(text[:, :8], ids)
    likeliest = model.generate(ids, 5, temperature=0)
    assert torch.equal(likeliest[:, 8], model(ids)[:, -1].argmax(-1))
    assert torch.equal(model.generate(ids, 5, top_k=1), likeliest)
    with torch.no_grad():
        model.tokens.weight.fill_(float("nan"))
    assert model.generate(ids, 3).max() < 11  # a diverged model still gives tokens


class Named(TorchDispatchMode):
    """Keeps the names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_prediction_is_the_log_likelihood_by_a_kernel_that_is_deterministic_on_gpus(gpt):
    model, (ids, targets) = gpt().eval(), windows()
    with torch.no_grad(), Named() as ran:
        found = model.predict_step((ids, targets), 0)
    expected = torch.stack([-F.cross_entropy(model(ids)[i], targets[i], reduction="sum") for i in range(4)])
    torch.testing.assert_close(found, expected)
    assert "nll_loss_forward" in ran.names
    assert "nll_loss2d_forward" not in ran.names  # torch.use_deterministic_algorithms refuses it on CUDA


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 15}, r"width 15 does not divide over 2 heads; use width=16"),
        ({"width": 18, "heads": 6}, r"a head has 3 .*use width=24, or position=learned"),
        ({"layers": 0}, r"layers is 0; expected at least 1"),
        ({"norm": "batch"}, r"norm is 'batch'; use layer or rms"),
        ({"position": "none"}, r"position is 'none'; use learned or rotary"),
        ({"dropout": 1.0}, r"dropout is 1.0; .* as in dropout=0.1"),
    ],
)
def test_an_impossible_shape_is_refused_with_what_to_type(gpt, options, message):
    with pytest.raises(ValueError, match=message):
        gpt(**options)


def test_a_window_or_a_temperature_that_cannot_be_is_refused(gpt):
    with pytest.raises(ValueError, match=r"9 tokens, but the model's context is 8; set data.context=8"):
        gpt()(torch.zeros(1, 9, dtype=torch.long))
    with pytest.raises(ValueError, match="temperature -1"):
        gpt().generate(windows()[0], 1, temperature=-1)


def test_a_document_end_keeps_attention_inside_of_a_document(gpt):
    model = gpt(document_end=7).eval()
    window = torch.tensor([[1, 2, 7, 3, 4, 5]])
    apart = torch.cat([model(window[:, :3]), model(window[:, 3:])], dim=1)
    torch.testing.assert_close(model(window), apart)
    assert not torch.allclose(gpt(document_end=None).eval()(window), apart)


# The same numbers, faster


@pytest.mark.parametrize(("classes", "rows_each"), [(11, 20), (11, 7), (128, 7)])  # 11 are padded to 64
def test_the_loss_by_pieces_is_that_of_all_logits(classes, rows_each, monkeypatch):
    pieces = [slice(begin, begin + rows_each) for begin in range(0, 20, rows_each)]
    cut = lambda _, *batch: [[each[piece] for each in batch] for piece in pieces]  # noqa: E731
    monkeypatch.setattr(cross_entropy, "_chunks", cut)
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 0)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 5, 8, generator=generator, requires_grad=True)
    weight = torch.randn(classes, 8, generator=generator, requires_grad=True)
    targets = torch.randint(classes, (4, 5), generator=generator)
    targets[1, 2:] = -100
    expected = F.cross_entropy(F.linear(x, weight).flatten(0, 1), targets.flatten())
    found = LinearCrossEntropy(-100)(x, weight, targets)
    torch.testing.assert_close(found, expected)
    for own, wanted in zip(*(torch.autograd.grad(3 * one, (x, weight)) for one in (found, expected)), strict=True):
        torch.testing.assert_close(own, wanted)


def test_one_product_gives_what_three_layers_do_and_a_hooked_layer_is_called():
    torch.manual_seed(0)
    layers = [Linear(8, outputs, bias=True, std=0.5) for outputs in (8, 4, 6)]
    for layer in layers:
        torch.nn.init.normal_(layer.bias)
    x = torch.randn(3, 5, 8)
    with Named() as ran:
        together = side_by_side(x, *layers)
    assert [*map(torch.Tensor.size, together)] == [(3, 5, 8), (3, 5, 4), (3, 5, 6)]
    for found, layer in zip(together, layers, strict=True):
        torch.testing.assert_close(found, layer(x))
    assert "cat" in ran.names
    called = []
    layers[1].register_forward_hook(lambda *_: called.append(1))
    for found, layer_by_layer in zip(side_by_side(x, *layers), together, strict=True):
        torch.testing.assert_close(found, layer_by_layer)
    assert called


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # a CPU's kernel has no backward pass
def test_attention_by_blocks_is_that_by_a_mask(gpt, monkeypatch):
    model = gpt(document_end=7)
    ids = torch.tensor([[1, 2, 7, 3, 4, 5], [7, 1, 1, 2, 3, 7]])
    with torch.no_grad():
        expected = model(ids)
        monkeypatch.setattr(gpt_module, "has_blocks", lambda *_: True)
        found = model(ids)
    torch.testing.assert_close(found, expected)
    assert not document_attention.has_blocks(ids, 64, 0.0)  # of a CPU


@pytest.mark.gpu
def test_a_gpu_skips_what_other_documents_hold(gpt, monkeypatch):
    model = gpt(document_end=7, width=64).cuda()
    batch = tuple(each.cuda() for each in windows())
    assert document_attention.has_blocks(batch[0], 32, 0.0)
    by_blocks = model.loss(batch)
    found = torch.autograd.grad(by_blocks, [*model.parameters()])
    monkeypatch.setattr(gpt_module, "has_blocks", lambda *_: False)
    by_mask = model.loss(batch)
    torch.testing.assert_close(by_blocks, by_mask)
    for own, wanted in zip(found, torch.autograd.grad(by_mask, [*model.parameters()]), strict=True):
        torch.testing.assert_close(own, wanted, atol=1e-4, rtol=1e-3)


def cut_head(rank, store):
    """Of two ranks, each with its half of a vocabulary: the loss and the gradients of a head that is whole."""
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 5, 8, generator=generator, requires_grad=True)
    weight = torch.randn(22, 8, generator=generator, requires_grad=True)
    targets = torch.randint(22, (4, 5), generator=generator)
    targets[1, 2:] = -100
    mine = weight.detach().chunk(2)[rank].clone().requires_grad_()
    loss, cut = LinearCrossEntropy(-100), LinearCrossEntropy(-100)
    VocabularyParallel()._apply(cut, init_device_mesh("cpu", (2,)))
    expected, found = loss(x, weight, targets), cut(x, mine, targets)
    torch.testing.assert_close(found, expected)
    by_x, by_weight = torch.autograd.grad(expected, (x, weight))
    own_x, own_weight = torch.autograd.grad(found, (x, mine))
    torch.testing.assert_close(own_x, by_x)
    torch.testing.assert_close(own_weight, by_weight.chunk(2)[rank])
    torch.distributed.destroy_process_group()


@pytest.mark.nightly
def test_a_head_that_is_cut_by_token_ids_gathers_no_logits(tmp_path):
    ranks = [context.Process(target=cut_head, args=(rank, tmp_path / "store")) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert [each.exitcode for each in ranks] == [0, 0]
