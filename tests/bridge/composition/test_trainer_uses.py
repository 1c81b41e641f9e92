"""Other ways to use HuggingFace's ``Trainer``, and Accelerate by hand: eager's losses, every call dispatched."""

from collections import Counter

import pytest
import torch
import transformers as hf
from torch import nn
from torch.utils.data import DataLoader, default_collate

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from bridge.dynamo.backend import graphs
from examples.layers import dispatch_layers, make_examples, make_model

pytestmark = pytest.mark.slow

accelerate = pytest.importorskip("accelerate")

WIDTH = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def bert(**options):
    return make_model(layers=1, hidden=16, **options)


def gpt2():
    torch.manual_seed(0)
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16, use_cache=False, **special)
    )


def vit():
    torch.manual_seed(0)
    rates = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    return hf.ViTForImageClassification(hf.ViTConfig(image_size=8, patch_size=4, num_labels=3, **WIDTH, **rates))


def sentences(count=8):
    return make_examples(count, 8)


def texts(count=8):
    ids = torch.randint(3, 50, (count, 9), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def pictures(count=8):
    pixels = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return [{"pixel_values": each, "labels": index % 3} for index, each in enumerate(pixels)]


def of_varying_length(count=10):
    lengths = torch.randint(5, 8, (count,), generator=torch.Generator().manual_seed(1)).tolist()
    return [
        {"input_ids": example["input_ids"][:length], "labels": example["labels"]}
        for example, length in zip(sentences(count), lengths, strict=True)
    ]


def padded(examples):
    ids = nn.utils.rnn.pad_sequence([example["input_ids"] for example in examples], batch_first=True)
    labels = torch.stack([example["labels"] for example in examples])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def run(folder, make, examples, prepare=None, collate=default_collate, **options):
    """Two epochs of batches of four (of ten examples, the last of two), evaluated after each; the log and the model."""
    model = make()
    if prepare:
        prepare(model.train(), collate(examples[:4]))
    settings = {"learning_rate": 1e-3, "logging_steps": 1, "eval_strategy": "epoch", "save_strategy": "no", "seed": 0}
    quiet = {"use_cpu": True, "disable_tqdm": True, "report_to": []}
    arguments = hf.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        **{**settings, **quiet, **options},
    )
    trainer = hf.Trainer(
        model=model, args=arguments, train_dataset=examples, eval_dataset=examples[:4], data_collator=collate
    )
    trainer.train()
    names = ("loss", "eval_loss", "grad_norm")
    log = trainer.state.log_history
    return [(entry["step"], name, float(entry[name])) for entry in log for name in names if name in entry], model


def assert_same_log(mine, eager, tolerance=1e-5):
    assert [entry[:2] for entry in mine] == [entry[:2] for entry in eager]
    assert [entry[2] for entry in mine] == pytest.approx([entry[2] for entry in eager], abs=tolerance)


def whole(model, batch):
    add_tvm_dispatch(model, dict(batch), on_miss="compile")


@pytest.mark.composes(
    '`Trainer`: whole BERT, GPT-2 (`use_cache=False`), ViT; `model.compile(backend="tvm_dispatch")`',
    "works",
    section="HuggingFace",
)
@pytest.mark.parametrize(
    ("make", "examples", "options"),
    [
        (bert, of_varying_length, {"collate": padded, "lr_scheduler_type": "cosine"}),
        pytest.param(gpt2, texts, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}, marks=pytest.mark.sweep),
        pytest.param(vit, pictures, {"optim": "sgd", "label_smoothing_factor": 0.1}, marks=pytest.mark.sweep),
    ],
)
def test_a_whole_model_is_dispatched(tmp_path, make, examples, options):
    """Evaluation runs without grad; where lengths vary, the last batch of an epoch is also smaller."""
    eager, _ = run(tmp_path, make, examples(), **options)
    mine, model = run(tmp_path, make, examples(), whole, **options)
    assert_same_log(mine, eager)
    assert stats(model).hits == 2 * -(-len(examples()) // 4) + 2 and not stats(model).misses


def test_a_cache_as_an_argument_is_refused_and_says_what_to_do():
    model = gpt2().train()
    sample = torch.randn(2, 9, 16), hf.DynamicCache()
    with pytest.raises(UnsupportedModule, match=r"(?s)a DynamicCache.*config.use_cache = False"):
        add_tvm_dispatch(model.transformer.h[0], sample)
    assert model.transformer.h[0]._compiled_call_impl is None


def checkpointed():
    model = bert()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.config.use_cache = False
    return model


@pytest.mark.sweep  # test_gradient_checkpointing.py has the layers, other tests the trainer
def test_checkpointed_layers(tmp_path):
    eager, _ = run(tmp_path, checkpointed, sentences())
    mine, model = run(tmp_path, checkpointed, sentences(), dispatch_layers)
    assert_same_log(mine, eager)
    (layer,) = model.bert.encoder.layer
    assert stats(layer).hits == 2 * 2 + 2 and not stats(layer).misses


@pytest.mark.composes('`Trainer`: whole BERT, GPT-2 (`use_cache=False`), ViT; `model.compile(backend="tvm_dispatch")`')
def test_a_model_compiled_in_place(tmp_path):
    """``TrainingArguments(torch_compile_backend=...)`` knows no other backends than Accelerate's own list."""
    known = graphs()
    eager, _ = run(tmp_path, checkpointed, sentences())
    mine, _ = run(tmp_path, checkpointed, sentences(), lambda model, _: model.compile(backend="tvm_dispatch"))
    assert_same_log(mine, eager)
    found = [graph for graph in graphs() if graph not in known]
    assert sum(graph.stats.hits for graph in found) >= 2 * 2 + 2
    assert not sum((graph.stats.misses for graph in found), Counter())


def test_checkpoints_are_eagers_files(tmp_path):
    model, eager, batch = bert().train(), bert().train(), default_collate(sentences()[:4])
    dispatch_layers(model, batch)
    for each, name in ((model, "dispatched"), (eager, "eager")):
        each(**batch)
        each.save_pretrained(tmp_path / name)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "dispatched" / name).read_bytes() == (tmp_path / "eager" / name).read_bytes()
    loaded = hf.BertForSequenceClassification.from_pretrained(tmp_path / "dispatched")
    assert all(layer._compiled_call_impl is None for layer in loaded.bert.encoder.layer)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


# Accelerate by hand


class LowRank(nn.Module):
    """A frozen linear layer with a trained update of rank 2."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features) / 4)
        self.up = nn.Parameter(torch.randn(base.out_features, 2) / 4)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden):
        return self.base(hidden) + self.dropout(hidden) @ self.down.T @ self.up.T


def with_adapters():
    model = bert()
    model.bert.requires_grad_(False)
    for layer in model.bert.encoder.layer:
        attention = layer.attention.self
        attention.query, attention.value = LowRank(attention.query), LowRank(attention.value)
    return model


def loop(folder, make, precision, dispatch):
    """Two epochs with accumulation, clipping and a schedule; the second starts from the state that the first saved."""
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    model = make().train()
    if dispatch:
        dispatch_layers(model, default_collate(sentences()[:4]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    order = torch.Generator().manual_seed(1)
    data = DataLoader(sentences(), batch_size=4, shuffle=True, generator=order, collate_fn=default_collate)
    prepared, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    losses = []
    for epoch in range(2):
        for batch in data:
            with accelerator.accumulate(prepared):
                loss = prepared(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    losses.append(float(accelerator.clip_grad_norm_(prepared.parameters(), 1.0)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        if epoch == 0:
            accelerator.save_state(folder)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            accelerator.load_state(folder)
    assert accelerator.unwrap_model(prepared) is model
    return losses, model


@pytest.mark.composes("Accelerate by hand, low-rank adapters, bfloat16", "works", section="HuggingFace")
@pytest.mark.parametrize(
    ("make", "precision"),
    [(with_adapters, "bf16"), pytest.param(with_adapters, "no", marks=pytest.mark.sweep)],
    ids=["bf16", "float32"],
)
def test_accelerate_by_hand(tmp_path, make, precision):
    eager, _ = loop(tmp_path / "eager", make, precision, dispatch=False)
    mine, model = loop(tmp_path / "mine", make, precision, dispatch=True)
    assert len(mine) == len(eager)
    assert mine == pytest.approx(eager, abs=2e-3 if precision == "bf16" else 1e-5)
    (layer,) = model.bert.encoder.layer
    assert stats(layer).hits == 4 and not stats(layer).misses
