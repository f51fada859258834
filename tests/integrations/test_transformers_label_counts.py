"""Which labels a loss is a mean over, as the loss itself says."""

import copy
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    DistilBertConfig,
    DistilBertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    SegformerConfig,
    SegformerForSemanticSegmentation,
)

from pipework import MicroBatches, attach
from pipework.integrations.transformers import weight_of_labels
from tests.tiers import one_quick

CLASSES, PAD = 11, 2
Loss = Callable[[Tensor, Tensor], Tensor]


def token_mean(logits: Tensor, labels: Tensor, *, shifted: bool, ignored: tuple[int, ...]) -> Tensor:
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    for each in ignored:
        labels = labels.masked_fill(labels == each, -1)
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-1)


def row_mean(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.stack(
        [functional.cross_entropy(*each, ignore_index=-100) for each in zip(logits, labels, strict=True)]
    ).mean()


def found(loss: Loss, labels: Tensor, config: LlamaConfig | SegformerConfig | None = None) -> Any:
    logits = torch.zeros(*labels.shape, CLASSES)

    def ask(asked: Tensor) -> Any:
        given = torch.zeros_like(logits, requires_grad=True).clone()
        return SimpleNamespace(loss=loss(given, asked), logits=given)

    return weight_of_labels("Net", labels, logits, ask, config or LlamaConfig(pad_token_id=PAD))


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("label", [-100, 0, PAD, 5])
def test_shifted_or_not_and_with_every_label_that_is_ignored(rows: int, label: int) -> None:
    # Of one row, two or fewer labels leave nothing to compare with.
    for length in (1, 2, 3, 4, 5, 6, 40)[2 * (rows == 1) :]:
        for shifted in (False, True)[:length]:
            for ignored in ((-100,), (-100, PAD))[: 2 if length > 4 else 1]:
                loss = functools.partial(token_mean, shifted=shifted, ignored=ignored)
                weight = found(loss, torch.full((rows, length), label))
                assert weight.keywords == {"is_shifted": shifted, "ignored": ignored}


def test_other_means() -> None:
    labels = torch.zeros(2, 8, dtype=torch.long)
    assert found(row_mean, labels) is None
    assert (
        found(lambda logits, labels: token_mean(logits, labels.clamp(min=0), shifted=False, ignored=()), labels) is None
    )
    other = found(
        functools.partial(token_mean, shifted=False, ignored=(7,)),
        labels,
        SegformerConfig(semantic_loss_ignore_index=7),
    )
    assert other.keywords == {"is_shifted": False, "ignored": (7,)}
    assert int(other(torch.tensor([[7, 7, 3], [1, 7, 2]]))) == 3


CANNOT: dict[str, Loss] = {
    "weights by position": lambda logits, labels: (
        functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none") * torch.arange(1.0, 9.0)
    ).mean(),
    "not of the logits": lambda logits, labels: torch.zeros((), requires_grad=True) * 2,
    "squares": lambda logits, labels: (logits[..., 0] - labels).square().mean(),
}


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_be_told_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be told which of the labels, of shape \(2, 8\).*attach loss_weight="):
        found(CANNOT[name], torch.ones(2, 8, dtype=torch.long))


class Ignores(LlamaForCausalLM):
    """Leaves out padding itself."""

    def forward(self, *arguments: Any, labels: Tensor | None = None, **keywords: Any) -> Any:
        labels = None if labels is None else labels.masked_fill(labels == PAD, -100)
        return super().forward(*arguments, labels=labels, **keywords)


def llama(kind: type[LlamaForCausalLM] = LlamaForCausalLM) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return kind(LlamaConfig(vocab_size=60, pad_token_id=PAD, bos_token_id=0, eos_token_id=1, **sizes))


def padded(marked: bool) -> dict[str, Tensor]:
    """Rows of unequal lengths, of which the first are short, so that the sample's last labels do not count."""
    lengths = torch.tensor([3, 4, 20, 12, 3, 30, 5, 4])
    ids = torch.randint(3, 60, (8, 32), generator=torch.Generator().manual_seed(1))
    is_padding = torch.arange(32) >= lengths[:, None]
    ids = ids.masked_fill(is_padding, PAD)
    labels = ids.masked_fill(is_padding, -100) if marked else ids
    return {"input_ids": ids, "attention_mask": (~is_padding).long(), "labels": labels}


def keywords_of(model: nn.Module, sample: dict[str, Any], chunks: int = 4) -> dict[str, Any]:
    """Which labels a pipe counts that is attached to a model."""
    return attach(model, sample, chunks=chunks, devices=["cpu"] * 2)._executor.settings.loss_weight.keywords


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [LlamaForCausalLM, Ignores])
def test_a_sample_whose_last_labels_do_not_count(kind: type[LlamaForCausalLM]) -> None:
    model, plain, batch = llama(kind), llama(kind), padded(kind is LlamaForCausalLM)
    sample = {name: value[:2] for name, value in batch.items()}
    with torch.device("meta"):
        empty = llama(kind)
    assert keywords_of(model, sample) == keywords_of(empty, sample)
    loss, expected = model(**batch).loss, plain(**batch).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for parameter, own in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own.grad, parameter.grad)


@pytest.mark.thorough
def test_pixels_that_do_not_count() -> None:
    config = SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 8], num_attention_heads=[1, 1],
        patch_sizes=[3, 3], strides=[2, 2], decoder_hidden_size=8, num_labels=4, drop_path_rate=0.0,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = SegformerForSemanticSegmentation(config).eval()
    labels = torch.randint(4, (6, 16, 16))
    labels[::2, 3:] = 255
    batch = {"pixel_values": torch.randn(6, 3, 16, 16), "labels": labels}
    sample = {name: value[1:3] for name, value in batch.items()}
    assert keywords_of(model, sample, 6) == {"is_shifted": False, "ignored": (255,)}
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).loss, type(model).forward(model, **batch).loss)


@pytest.mark.thorough
def test_a_loss_that_is_a_unit_of_the_model() -> None:
    model = DistilBertForMaskedLM(DistilBertConfig(vocab_size=60, dim=16, hidden_dim=24, n_layers=2, n_heads=2))
    assert keywords_of(model, {name: value[:2] for name, value in padded(True).items()}) == {
        "is_shifted": False, "ignored": (-100,)
    }  # fmt: skip


def test_a_sample_of_packed_micro_batches() -> None:
    packed = {name: MicroBatches(value.flatten()[None].chunk(3, 1)) for name, value in padded(True).items()}
    assert keywords_of(llama(), packed, 3) == {"is_shifted": True, "ignored": (-100,)}


@pytest.mark.parametrize("given", one_quick(["rows", "rows without check", "micro-batches"]))
@pytest.mark.parametrize("name", one_quick(["XLMRobertaXL", "BioGpt", "Llama"]))
def test_labels_that_the_model_hides_by_its_mask_have_no_weight(name: str, given: str) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = getattr(transformers, f"{name}Config")(**sizes, vocab_size=40, num_labels=5, pad_token_id=1)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForTokenClassification")(config).eval()
    plain, ids = copy.deepcopy(model), torch.randint(3, 40, (8, 8))
    lengths = torch.tensor([3, 8, 5, 8, 2, 8, 7, 8])
    batch = {"input_ids": ids, "attention_mask": (torch.arange(8) < lengths[:, None]).long(), "labels": ids % 5}
    whole, sample = batch, {key: value[:2] for key, value in batch.items()}
    if given == "micro-batches":
        whole = sample = {key: MicroBatches(value.chunk(4)) for key, value in batch.items()}
    attach(model, sample, chunks=4, devices=["cpu", "cpu"], check=given == "rows")
    with torch.no_grad():
        torch.testing.assert_close(model(**whole).loss, plain(**batch).loss, rtol=1e-6, atol=0)
