"""The callbacks in the real loops of HuggingFace and Lightning: eager's losses, every call dispatched."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

from bridge import stats
from tests.bridge.callbacks.test_first_call import Model
from tests.sampling import sampled

pytestmark = pytest.mark.slow


def sentences(count=10):
    ids = torch.randint(3, 50, (count, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": index % 2} for index, row in enumerate(ids)]


def fine_tune(folder, callbacks, **options):
    hf = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = hf.BertForSequenceClassification(hf.BertConfig(vocab_size=50, **size))
    arguments = hf.TrainingArguments(
        output_dir=str(folder),
        **{"max_steps": 6, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "seed": 0},
        **{"eval_strategy": "steps", "eval_steps": 3, "logging_steps": 1, "save_strategy": "no", "learning_rate": 1e-3},
        **{"use_cpu": True, "disable_tqdm": True, "report_to": [], **options},
    )
    trainer = hf.Trainer(
        model=model,
        args=arguments,
        train_dataset=sentences(),
        eval_dataset=sentences(4),
        data_collator=default_collate,
        callbacks=callbacks,
    )
    trainer.train()
    names = ("loss", "eval_loss", "grad_norm")
    log = trainer.state.log_history
    return [float(entry[name]) for entry in log for name in names if name in entry], model


@pytest.mark.composes(
    "`Trainer(callbacks=[TrainerDispatch()])`",
    "dispatches the layers at the first batch, in its state; `dataloader_drop_last`, evaluation, checkpointing",
    section="HuggingFace",
)
@pytest.mark.parametrize(
    "options", sampled([{}, {"gradient_checkpointing": True, "gradient_accumulation_steps": 2}], [{}])
)
def test_huggingfaces_trainer(tmp_path, options):
    """Six steps of an epoch of ten examples, so that every third batch has two; evaluated twice."""
    from bridge.callbacks import TrainerDispatch

    callback = TrainerDispatch("BertLayer")
    mine, model = fine_tune(tmp_path, [callback], **options)
    eager, _ = fine_tune(tmp_path, [], **options)
    assert mine == pytest.approx(eager, abs=1e-5) and len(mine) == 6 * 2 + 2
    layers = list(model.bert.encoder.layer)
    assert list(callback.dispatched.values()) == layers and not callback.refused
    for layer in layers:
        assert not stats(layer).misses and stats(layer).hits >= 6 + 2
    assert "0 misses" in callback.report()


def fit(callbacks):
    lightning = pytest.importorskip("lightning.pytorch")

    class Training(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.model = Model()
            self.losses = []

        def training_step(self, batch, index):
            loss = self.model(batch)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch, index):
            self.losses.append(self.model(batch).item())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(0)
    data = [DataLoader(torch.randn(count, 4), batch_size=3) for count in (9, 3)]
    module = Training()
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    torch.manual_seed(1)
    trainer = lightning.Trainer(max_epochs=2, callbacks=callbacks, enable_model_summary=False, **options)
    trainer.fit(module, *data)
    return module


@pytest.mark.composes(
    "Lightning: `Trainer(callbacks=[LightningDispatch()])`",
    "dispatches the layers at the first batch of the training",
    section="HuggingFace",
)
@pytest.mark.parametrize("layers", [None, "whole"])
def test_lightnings_trainer(layers):
    pytest.importorskip("lightning.pytorch")
    from bridge.callbacks import LightningDispatch

    callback = LightningDispatch(layers)
    mine, eager = fit([callback]), fit([])
    assert mine.losses == pytest.approx(eager.losses, abs=1e-5) and len(mine.losses) == 1 + 2 * (3 + 1)
    expected = [mine.model] if layers else list(mine.model.blocks)
    assert list(callback.dispatched.values()) == expected
    assert all(stats(each).hits == 2 * (3 + 1) and not stats(each).misses for each in expected)
    assert isinstance(copy.deepcopy(mine.model), nn.Module)
