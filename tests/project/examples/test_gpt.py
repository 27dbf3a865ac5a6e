"""The GPT: what its options do, and that its outputs are what they claim."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from project.data.windows import ManyWindows, Windows
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
def test_a_later_token_changes_no_earlier_logits(gpt, options):
    model = gpt(**options).eval()
    ids, _ = windows()
    changed = ids.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    before, after = model(ids), model(changed)
    torch.testing.assert_close(after[:, :5], before[:, :5])
    assert not torch.allclose(after[:, 5:], before[:, 5:])


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


def test_rotary_angles_stay_exact_in_16_bits():
    half, full = (rotary(1024, 8, like=torch.zeros(1, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32))
    torch.testing.assert_close(half, full)


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


def test_residual_projections_begin_smaller_with_depth(gpt):
    model = gpt(layers=8, width=64, init_std=0.02)
    for block in model.transformer.blocks:
        assert block.attention.queries.weight.std().item() == pytest.approx(0.02, rel=0.1)
        assert block.attention.output.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)  # √(2 · 8) = 4
        assert block.mlp.output.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)


def test_weights_made_on_the_meta_device_are_those_of_the_constructor(gpt):
    expected = gpt(position="learned", bias=True, tied=False)
    with torch.device("meta"):
        model = gpt(position="learned", bias=True, tied=False)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model.modules():
        if list(module.parameters(recurse=False)):
            module.reset_parameters()
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_generation_continues_the_prompt_within_the_context(gpt):
    model, (ids, _) = gpt().eval(), windows()
    text = model.generate(ids, 12, top_k=3, generator=torch.Generator().manual_seed(0))
    again = model.generate(ids, 12, top_k=3, generator=torch.Generator().manual_seed(0))
    assert text.shape == (4, 20)
    assert torch.equal(text, again)
    assert torch.equal(text[:, :8], ids)


def test_generation_at_temperature_zero_or_top_one_takes_the_likeliest(gpt):
    model, (ids, _) = gpt().eval(), windows()
    likeliest = model.generate(ids, 5, temperature=0)
    assert torch.equal(likeliest[:, 8], model(ids)[:, -1].argmax(-1))
    assert torch.equal(model.generate(ids, 5, top_k=1), likeliest)


def test_a_diverged_model_still_gives_tokens(gpt):
    model, (ids, _) = gpt().eval(), windows()
    with torch.no_grad():
        model.tokens.weight.fill_(float("nan"))
    assert model.generate(ids, 3).max() < 11


class Named(TorchDispatchMode):
    """Keeps the names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_prediction_has_a_deterministic_kernel_on_gpus(gpt):
    with torch.no_grad(), Named() as ran:
        gpt().eval().predict_step(windows(), 0)
    assert "nll_loss_forward" in ran.names
    assert "nll_loss2d_forward" not in ran.names  # torch.use_deterministic_algorithms refuses it on CUDA


def test_prediction_is_the_log_likelihood_of_each_sequence(gpt):
    model, (ids, targets) = gpt().eval(), windows()
    expected = torch.stack([-F.cross_entropy(model(ids)[i], targets[i], reduction="sum") for i in range(4)])
    torch.testing.assert_close(model.predict_step((ids, targets), 0), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 15}, r"width 15 does not divide over 2 heads; use width=16"),
        ({"width": 18, "heads": 6}, r"a head has 3 .*use width=24, or position=learned"),
        ({"layers": 0}, r"layers is 0; expected at least 1"),
        ({"context": 0}, r"context is 0; expected at least 1"),
        ({"norm": "batch"}, r"norm is 'batch'; use layer or rms"),
        ({"mlp": "relu"}, r"mlp is 'relu'; use gelu or swiglu"),
        ({"position": "none"}, r"position is 'none'; use learned or rotary"),
        ({"dropout": 1.0}, r"dropout is 1.0; .* as in dropout=0.1"),
    ],
)
def test_an_impossible_shape_is_refused_with_what_to_type(gpt, options, message):
    with pytest.raises(ValueError, match=message):
        gpt(**options)


def test_a_window_longer_than_the_context_is_refused(gpt):
    with pytest.raises(ValueError, match=r"9 tokens, but the model's context is 8; set data.context=8"):
        gpt()(torch.zeros(1, 9, dtype=torch.long))


def test_an_impossible_temperature_is_refused(gpt):
    with pytest.raises(ValueError, match="temperature -1"):
        gpt().generate(windows()[0], 1, temperature=-1)


def test_an_optimizer_without_groups_of_its_own_takes_the_groups(gpt):
    optimizer = gpt(optimizer=partial(torch.optim.SGD, lr=0.1)).configure_optimizers()
    assert len(optimizer.param_groups) == 2


def test_a_document_end_keeps_attention_inside_of_a_document(gpt):
    model = gpt(document_end=7).eval()
    window = torch.tensor([[1, 2, 7, 3, 4, 5]])
    apart = torch.cat([model(window[:, :3]), model(window[:, 3:])], dim=1)
    torch.testing.assert_close(model(window), apart)
    assert not torch.allclose(gpt(document_end=None).eval()(window), apart)


# The same numbers, faster


@pytest.mark.parametrize("classes", [11, 128])  # padded to 64, and not
@pytest.mark.parametrize("rows_each", [20, 7])
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


def test_a_piece_of_gpt2s_logits_takes_half_a_gibibyte_at_most():
    rows = torch.empty(16 * 1024, 1, device="meta")
    sizes = [len(x) for (x,) in cross_entropy._chunks(50257, rows)]
    assert sum(sizes) == 16 * 1024
    assert max(sizes) * 50257 * 4 <= 2**29


@pytest.mark.parametrize("options", OPTIONS)
def test_the_loss_of_a_batch_is_that_of_its_logits(gpt, options):
    model, (ids, targets) = gpt(**options).eval(), windows()
    torch.testing.assert_close(model.loss((ids, targets)), F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()))


def test_evaluation_makes_no_gradients_of_the_head(gpt, monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 0)
    with torch.no_grad(), Named() as ran:
        gpt().eval().loss(windows())
    assert "_log_softmax" in ran.names
    assert "scatter_" not in ran.names


def test_one_product_gives_what_three_layers_do():
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


def test_a_layer_that_is_hooked_is_called(gpt):
    attention, called, x = gpt().transformer.blocks[0].attention, [], torch.randn(3, 5, 16)
    layers = (attention.queries, attention.keys, attention.values)
    expected = side_by_side(x, *layers)
    attention.keys.register_forward_hook(lambda *_: called.append(1))
    torch.testing.assert_close(side_by_side(x, *layers), expected)
    assert called


def test_rotary_positions_are_compiled_without_complex_numbers():
    x = torch.randn(2, 3, 5, 8)
    graphs = []

    def noted(graph, _):
        graphs.append(str(graph.graph))
        return graph

    found = torch.compile(rotate, backend=noted)(x, rotary(5, 8, like=x))
    assert "complex" not in "".join(graphs)
    torch.testing.assert_close(found, rotate(x, rotary(5, 8, like=x)))


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


def test_batches_have_no_gaps_that_a_gpu_would_wait_for():
    tokens = np.arange(100, dtype=np.uint8)
    for data in (Windows(tokens, 8), ManyWindows([tokens, tokens], 8)):
        inputs, targets = data.__getitems__([3, 1])
        assert inputs.is_contiguous()
        assert targets.is_contiguous()
        assert inputs.tolist() == [[*range(24, 32)], [*range(8, 16)]]
        assert torch.equal(targets, inputs + 1)


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


def test_a_head_that_is_cut_by_token_ids_gathers_no_logits(tmp_path):
    ranks = [context.Process(target=cut_head, args=(rank, tmp_path / "store")) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert [each.exitcode for each in ranks] == [0, 0]
