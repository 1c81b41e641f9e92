"""``flex_attention`` in training on a CPU, where eager has no backward: beside attention written out by hand."""

import copy
import itertools
import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention as torchs
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, and_masks, create_block_mask, flex_attention

from bridge import UnsupportedModule, add_tvm_dispatch, remove_tvm_dispatch, stats
from bridge.capture import higher_order
from tests.device import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:return_lse is deprecated")
LENGTH, WIDTH = 6, 4
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 2, 2]], device=DEVICE)


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return (q >= k) & (q - k < 3)


def of_no_key(b, h, q, k):
    return (q >= k) & (q > 1)


def by_head(b, h, q, k):
    return (q >= k) | (h == 1)


def of_document(b, h, q, k):
    return DOCUMENTS[b, q] == DOCUMENTS[b, k]


def blocks(mask_mod, batch=None, heads=None):
    return create_block_mask(mask_mod, batch, heads, LENGTH, LENGTH, device=DEVICE, BLOCK_SIZE=4)


def by_hand(function, scores=None, shape=None):
    """A function's values for each score and its indices, or for the indices alone: one call for each."""
    places = itertools.product(*map(range, scores.shape if shape is None else shape))
    made = [
        function(*(() if scores is None else (scores[place],)), *(torch.tensor(each) for each in place))
        for place in places
    ]
    return torch.stack(made).reshape(scores.shape if shape is None else shape)


def written(q, k, v, score_mod=None, block_mask=None, scale=None):
    """Attention by hand: ``(output, logsumexp)``."""
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    seen = torch.ones(scores.shape, dtype=torch.bool)
    if score_mod is not None:
        scores = by_hand(score_mod, scores)
    if block_mask is not None:
        seen = by_hand(block_mask.mask_mod, shape=scores.shape)
    weights = torch.where(seen, scores.exp(), 0)
    total = weights.sum(-1, keepdim=True)
    found = torch.where(total > 0, weights / torch.where(total > 0, total, 1), 0) @ v
    logsumexp = torch.where(total > 0, torch.where(total > 0, total, 1).log(), -math.inf)
    return found, logsumexp.squeeze(-1)


class Attention(nn.Module):
    """Heads that attend, with tensors that a ``score_mod`` may read.

    Args:
        how: the module → keyword arguments for ``flex_attention``.
        heads: of queries, and ``groups`` of keys.
        function: the one that forward calls.
    """

    def __init__(self, how, heads=2, groups=None, function=flex_attention):
        super().__init__()
        torch.manual_seed(0)
        self.how, self.heads, self.groups, self.function = how, heads, groups or heads, function
        self.queries = nn.Linear(heads * WIDTH, heads * WIDTH)
        self.pairs = nn.Linear(heads * WIDTH, 2 * self.groups * WIDTH)
        self.slopes, self.bias = nn.Parameter(torch.rand(heads)), nn.Parameter(torch.randn(heads, 2 * LENGTH))
        self.cap = 2.0
        self.double()

    def forward(self, x, written=None, **more):
        batch, length, _ = x.shape
        q = self.queries(x).view(batch, length, self.heads, WIDTH).transpose(1, 2)
        k, v = self.pairs(x).view(batch, length, 2, self.groups, WIDTH).permute(2, 0, 3, 1, 4)
        options = self.how(self)
        if written is not None:
            options.pop("enable_gqa", None)
        return (written or self.function)(q, k, v, **options, **more)


def inputs(heads=2, batch=2):
    return torch.randn(
        batch, LENGTH, heads * WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()


def step(module, x, number_of_results=1, **more):
    """The results, and the gradients of the input and the parameters."""
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    made = module(x, **more)
    made = list(made if isinstance(made, tuple) else [made])[:number_of_results]
    finite = [torch.where(each.isfinite(), each, 0) for each in made]
    sum((each * torch.arange(each.numel()).view(each.shape).cos()).sum() for each in finite).backward()
    return made, [x.grad, *(each.grad for each in module.parameters())]


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def check(how, heads=2, groups=None, batch=2, function=flex_attention):
    """Two steps of a dispatched module beside the same written by hand; the module."""
    module, x = Attention(how, heads, groups, function), inputs(heads, batch)
    other = copy.deepcopy(module)
    add_tvm_dispatch(module, x)
    for scale in (1, -2):
        (made, grads), (wanted, wanted_grads) = step(module, scale * x), step(other, scale * x, written=written)
        close(made, wanted)
        for found, each in zip(grads, wanted_grads, strict=True):
            if each is None:
                assert found is None or not found.any()
            else:
                close(found, each)
    assert stats(module).hits == 2 and not stats(module).misses
    return module


def relative(m):
    return lambda score, b, h, q, k: score + m.bias[h, q - k + LENGTH]


MODS = {
    "nothing": lambda m: {},
    "causal": lambda m: {"block_mask": blocks(causal)},
    "a window": lambda m: {"block_mask": blocks(window)},
    "documents": lambda m: {"block_mask": blocks(and_masks(causal, of_document), 2)},
    "a mask by heads": lambda m: {"block_mask": blocks(by_head, None, 2)},
    "rows of no key": lambda m: {"block_mask": blocks(of_no_key)},
    "a scale": lambda m: {"scale": 0.7},
    "slopes": lambda m: {"score_mod": lambda score, b, h, q, k: score + m.slopes[h] * (k - q)},
    "a learned bias": lambda m: {"score_mod": relative(m)},
    "a learned bias of two indexings": lambda m: {"score_mod": lambda s, b, h, q, k: s * m.bias[0, q] + m.bias[h][k]},
    "a soft cap": lambda m: {"score_mod": lambda score, b, h, q, k: m.cap * torch.tanh(score / m.cap)},
    "a score_mod that hides": lambda m: {"score_mod": lambda s, b, h, q, k: torch.where(q >= k, s, -math.inf)},
    "all of it": lambda m: {"score_mod": relative(m), "block_mask": blocks(and_masks(causal, of_document), 2)},
    "scores that are not used": lambda m: {"score_mod": lambda score, b, h, q, k: m.bias[h, q] * m.slopes[h] * k},
}


@pytest.mark.composes(
    "`flex_attention`",
    "attention written out, `score_mod` and `mask_mod` under `vmap` as in eager; trains on a CPU, where eager refuses",
    section="Autograd, memory, threads",
)
@pytest.mark.parametrize("case", MODS)
def test_training_is_attention_written_out(case):
    if case == "scores that are not used" and torch.__version__ >= "2.14":
        with pytest.raises(UnsupportedModule, match="requires the output of score_mod to depend on score"):
            check(MODS[case])
        return
    check(MODS[case])


@pytest.mark.parametrize("groups", [2, 1])
def test_grouped_queries(groups):
    check(lambda m: {**MODS["all of it"](m), "enable_gqa": True}, 4, groups)


@pytest.mark.composes(
    "`torch.compile(flex_attention)` in forward", "as `flex_attention`", section="Autograd, memory, threads"
)
@pytest.mark.parametrize("how", [{}, {"fullgraph": True, "dynamic": False}])
def test_a_compiled_flex_attention_is_flex_attention(how):
    check(MODS["all of it"], function=torch.compile(flex_attention, **how))


def test_keys_of_one_batch_for_all():
    class One(Attention):
        def forward(self, x, written=None):
            q = self.queries(x).view(2, LENGTH, 2, WIDTH).transpose(1, 2)
            k, v = self.pairs(x[:1]).view(1, LENGTH, 2, 2, WIDTH).permute(2, 0, 3, 1, 4)
            return (written or flex_attention)(q, k, v, block_mask=blocks(of_document, 2))

    module, x = One(None), inputs()
    other = copy.deepcopy(module)
    add_tvm_dispatch(module, x)
    (made, grads), (wanted, wanted_grads) = step(module, x), step(other, x, written=written)
    close([*made, *grads[:5]], [*wanted, *wanted_grads[:5]])


@pytest.mark.parametrize("case", ["rows of no key", "a score_mod that hides"])
def test_logsumexp_has_a_gradient(case):
    module, x = Attention(lambda m: {**MODS[case](m), "return_lse": True}), inputs()
    other = Attention(MODS[case])
    add_tvm_dispatch(module, x)
    (made, grads), (wanted, wanted_grads) = step(module, x, 2), step(other, x, 2, written=written)
    close(made, wanted)
    close([each for each in grads if each is not None], [each for each in wanted_grads if each is not None])
    assert all(each.isfinite().all() for each in grads if each is not None)


@pytest.mark.parametrize("case", ["rows of no key", "all of it"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_gradients_it_is_eagers(case, dtype):
    module, x = (
        Attention(lambda m: {**MODS[case](m), "return_aux": AuxRequest(lse=True)}).to(dtype),
        inputs().detach().to(dtype),
    )
    with torch.no_grad():
        wanted, aux = module(x)
        add_tvm_dispatch(module, x)
        found, found_aux = module(x)
    assert stats(module).hits == 1 and type(found_aux) is type(aux) and found_aux.max_scores is None
    assert found.stride() == wanted.stride() and found.dtype == wanted.dtype and found_aux.lse.dtype == aux.lse.dtype
    options = {} if dtype != torch.bfloat16 else {"rtol": 4e-2, "atol": 2e-2}
    torch.testing.assert_close([found, found_aux.lse], [wanted, aux.lse], **options)


@pytest.mark.parametrize("case", ["rows of no key", "slopes"])
def test_gradients_are_those_of_eagers_backward(case, monkeypatch):
    """torch has a backward for a CPU, before which a check of the device stands."""
    module, x = Attention(lambda m: {**MODS[case](m), "return_lse": True}), inputs()
    other = copy.deepcopy(module)
    add_tvm_dispatch(module, x)
    found = step(module, x, 2)
    monkeypatch.setattr(torchs, "_validate_device", lambda *_: None)
    wanted = step(other, x, 2)
    close(found[0], wanted[0])
    assert [each is None for each in found[1]] == [each is None for each in wanted[1]]
    close([each for each in found[1] if each is not None], [each for each in wanted[1] if each is not None])


def test_under_autocast():
    module, x = Attention(MODS["all of it"]).float(), inputs().detach().float()
    with torch.no_grad(), torch.autocast(DEVICE.type, torch.bfloat16):
        wanted = module(x)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        add_tvm_dispatch(module, x)
        found = module(x)
    found.float().square().sum().backward()
    assert stats(module).hits == 1 and found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=4e-2, atol=2e-2)
    assert all(each.grad.isfinite().all() for each in (module.queries.weight, module.pairs.weight, module.bias))


def test_what_the_functions_read_is_a_condition():
    module = check(MODS["a soft cap"])
    module.cap = 3.0
    with torch.no_grad(), pytest.raises(AssertionError):
        close(module(inputs()), Attention(MODS["a soft cap"])(inputs(), written=written)[0])
    assert stats(module).misses.total() == 1


def test_tensors_of_a_mask_are_inputs():
    ids = DOCUMENTS.clone()
    mask = blocks(lambda b, h, q, k: (q >= k) & (ids[b, q] == ids[b, k]), 2)
    module, x = Attention(lambda m: {"block_mask": mask}), inputs()
    other = copy.deepcopy(module)
    other.how = module.how
    add_tvm_dispatch(module, x)
    for place in (2, 4):
        ids[0, place] = 1 - ids[0, place]
        close(step(module, x), step(other, x, written=written))
    assert stats(module).hits == 2


def test_a_mask_that_is_an_attribute():
    module, x = Attention(lambda m: {"block_mask": m.mask}), inputs()
    module.mask = blocks(causal)
    other = copy.deepcopy(module)
    add_tvm_dispatch(module, x, on_miss="compile")
    for mask in (module.mask, blocks(window)):
        module.mask = other.mask = mask
        close(step(module, x)[0], step(other, x, written=written)[0])
    assert [each.hits for each in stats(module).entries] == [1, 1]


def documents(ids, size=4, mod=causal):
    mask_mod = and_masks(mod, lambda b, h, q, k: ids[b, q] == ids[b, k])
    return create_block_mask(mask_mod, 2, None, LENGTH, LENGTH, device=DEVICE, BLOCK_SIZE=size)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention(None)

    def forward(self, x, masks, written=None):
        mask = masks["one"] if isinstance(masks, dict) else masks
        batch, length, _ = x.shape
        q = self.attention.queries(x).view(batch, length, 2, WIDTH).transpose(1, 2)
        k, v = self.attention.pairs(x).view(batch, length, 2, 2, WIDTH).permute(2, 0, 3, 1, 4)
        return (written or flex_attention)(q, k, v, block_mask=mask)


@pytest.mark.composes(
    "a `BlockMask` among the arguments",
    "its tensors and its `mask_mod`'s are inputs; another `mask_mod` or block size misses",
    section="Autograd, memory, threads",
)
@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("form", ["the mask", "a dictionary"])
def test_a_mask_that_is_an_argument(form, registered):
    def given(mask):
        return mask if form == "the mask" else {"one": mask, "other": mask}

    pytree, on_host = torch.utils._pytree, DEVICE.type == "cpu"
    if registered:
        pytree.register_pytree_node(BlockMask, BlockMask._flatten, BlockMask._unflatten)
    try:
        module, x = Masked(), inputs()
        other = copy.deepcopy(module)
        add_tvm_dispatch(module, (x, given(documents(DOCUMENTS))))
        for ids in (DOCUMENTS, 1 - DOCUMENTS.clamp(max=1), DOCUMENTS.flip(1)):
            masks = given(documents(ids))
            found, wanted = step(module, x, masks=masks), step(other, x, masks=masks, written=written)
            close(found[0], wanted[0])
            close([each for each in found[1] if each is not None], [each for each in wanted[1] if each is not None])
        assert stats(module).hits == 3 and not stats(module).misses
        for mask in (documents(DOCUMENTS, mod=window), documents(DOCUMENTS, 2), blocks(causal)):
            with pytest.raises(NotImplementedError, match="backward on CPU") if on_host else nullcontext():  # eager's
                module(x, given(mask))
        assert stats(module).hits == 3
        assert all("mask_mod" in each or "BLOCK_SIZE" in each or "num_blocks" in each for each in stats(module).misses)
    finally:
        if registered:
            pytree._deregister_pytree_node(BlockMask)


def test_twenty_steps_of_sgd():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.first, self.last = Attention(MODS["all of it"]), nn.Linear(8, 16), nn.Linear(16, 8)
            self.double()

        def forward(self, x, written=None):
            made = self.attention(x, written)
            x = x + (made if written is None else made[0]).transpose(1, 2).flatten(2)
            return x + self.last(torch.nn.functional.gelu(self.first(x)))

    module, losses = Block(), []
    other = copy.deepcopy(module)
    add_tvm_dispatch(module, inputs().detach())
    for each, how in ((module, {}), (other, {"written": written})):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        losses.append([])
        for seed in range(20):
            x = torch.randn(2, LENGTH, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
            loss = (each(x, **how) - x.flip(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert stats(module).hits == 20 and losses[0][-1] < losses[0][0]
    torch.testing.assert_close(*losses, rtol=1e-10, atol=1e-10)
    close(list(module.parameters()), list(other.parameters()))


def test_modules_inside_of_what_is_not_captured_whole():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Attention(MODS["causal"])

        def forward(self, x, written=None):
            made = self.inner(x, written)
            made = made if written is None else made[0]
            return made * float(str(made.detach().sum().item()))  # a string of numbers: no graph holds it

    module, x = Outer(), inputs()
    other = copy.deepcopy(module)
    add_tvm_dispatch(module, x, whole=False)
    close(step(module, x)[0], step(other, x, written=written)[0])
    assert stats(module.inner).hits == 1


REFUSED = {
    "random operation": lambda m: {"score_mod": lambda score, b, h, q, k: score + torch.rand(())},
    "flex_attention: is refused by Dynamo": lambda m: {"score_mod": lambda s, b, h, q, k: m.seen.append(s) or s},
    "max scores is not supported on CPU": lambda m: {"return_aux": AuxRequest(max_scores=True)},
    "block_mask was created for": lambda m: {"block_mask": create_block_mask(causal, None, None, 4, 4, device=DEVICE)},
}


@pytest.mark.parametrize(
    "words",
    [pytest.param(each, marks=pytest.mark.cpu("eager's kernels")) if "on CPU" in each else each for each in REFUSED],
)
def test_what_torch_refuses_is_refused(words):
    module = Attention(REFUSED[words])
    module.seen = []
    with pytest.raises(Exception, match=words):
        add_tvm_dispatch(module, inputs())
    assert module.seen == []


@pytest.mark.cpu("eager has a backward elsewhere")
def test_eager_is_left_as_it_was():
    before = dict(vars(torchs)), dict(vars(torch.Tensor))
    module, x = Attention(MODS["causal"]), inputs()
    add_tvm_dispatch(module, x)
    module(x).sum().backward()
    assert {name for name, each in vars(torchs).items() if before[0].get(name) is not each} <= {"_WARNINGS_SHOWN"}
    assert dict(vars(torch.Tensor)) == before[1]
    remove_tvm_dispatch(module)
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        module(x)
    with torch.no_grad():
        close(module(x), module(x, written=written)[0])


def test_a_mask_of_blocks_alone_hides_as_in_eager():
    """Eager asks ``mask_mod`` alone."""
    number, indices = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 2, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(number, indices, BLOCK_SIZE=(LENGTH, LENGTH // 2), seq_lengths=(LENGTH, LENGTH))
    module, x = Attention(lambda m: {"block_mask": mask}), inputs()
    with torch.no_grad():
        wanted = module(x)
    add_tvm_dispatch(module, x)
    close(module(x).detach(), wanted)


@pytest.mark.composes(
    'transformers\' `attn_implementation="flex_attention"`',
    "trains on a CPU, with the numbers of `eager`",
    section="Autograd, memory, threads",
)
def test_a_language_model_of_transformers(monkeypatch):
    transformers = pytest.importorskip("transformers")
    wrapped = pytest.importorskip("transformers.integrations.flex_attention").WrappedFlexAttention
    monkeypatch.setattr(wrapped, "_instance", None)  # made by the first call of a process
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    models = []
    for how in ("flex_attention", "eager"):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**sizes, **heads, attn_implementation=how)
        models.append(transformers.LlamaForCausalLM(config).double())
    given = [torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 6:] = 0

    def batch(seed):
        return {"input_ids": given[seed], "labels": given[seed], "attention_mask": mask, "use_cache": False}

    module, losses = models[0], []
    add_tvm_dispatch(module, sample_kwargs=batch(3))
    for each in models:
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        losses.append([])
        for seed in range(3):
            optimizer.zero_grad()
            loss = each(**batch(seed)).loss
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert stats(module).hits == 3, stats(module)
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)  # the loss is float32
    torch.testing.assert_close(list(module.parameters()), list(models[1].parameters()), rtol=0, atol=1e-7)


def is_of_kernels_anywhere(query, score_mod):
    return score_mod is higher_order.no_score_mod


@pytest.mark.parametrize("mask", [causal, of_no_key, by_head, of_document, window], ids=lambda mask: mask.__name__)
def test_the_output_by_the_kernel_of_a_mask(mask, monkeypatch):
    """As on a GPU in narrow types, here by torch's formula in float64; rows without a key are zeros, and so is their
    gradient."""
    monkeypatch.setattr(higher_order, "_is_of_kernels", is_of_kernels_anywhere)
    check(lambda m: {"block_mask": blocks(mask, 2, 2), "enable_gqa": True}, groups=1)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="no GPU is tested")
def test_no_scores_lie_in_a_gpus_memory():
    length, heads, size = 1024, 8, 32
    mask = create_block_mask(causal, None, None, length, length, device=DEVICE)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.pairs = nn.Linear(heads * size, 3 * heads * size)

        def forward(self, x):
            q, k, v = self.pairs(x).view(*x.shape[:2], 3, heads, size).permute(2, 0, 3, 1, 4)
            return flex_attention(q, k, v, block_mask=mask)

    torch.manual_seed(0)
    module, x = Block().to(DEVICE, torch.bfloat16), torch.randn(4, length, heads * size, device=DEVICE)
    exact = copy.deepcopy(module).double()
    scores = 4 * x.shape[0] * heads * length**2
    for run in (lambda: add_tvm_dispatch(module, x.bfloat16()), *[lambda: module(x.bfloat16()).sum().backward()] * 3):
        module.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        assert torch.cuda.max_memory_allocated() - before < scores
    assert stats(module).hits == 3
    made = module(x.bfloat16())
    q, k, v = exact.pairs(x.double()).view(4, length, 3, heads, size).permute(2, 0, 3, 1, 4)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    wanted.sum().backward()
    torch.testing.assert_close(made.double(), wanted, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(module.pairs.bias.grad.double(), exact.pairs.bias.grad, rtol=5e-2, atol=2.0)
