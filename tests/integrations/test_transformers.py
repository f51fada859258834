"""Models of transformers, trained by a pipe that is attached to them, beside untouched copies."""

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from pipework import Pipe
from pipework.attached import attach, to_sequential
from pipework.integrations import adapter_for
from pipework.model.parts.cut import Cuttable
from pipework.testing import draw_key, micro_batch_random
from tests.integrations.architectures import ARCHITECTURES, text
from tests.integrations.comparing import (
    differences,
    joined,
    micro_batches,
    next_tokens,
    plain_backward,
    without_cache,
    without_randomness,
)

# PEFT asks transformers by an older name.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing. is deprecated:FutureWarning")

QUICK = {"Llama", "GPT-2", "Mixtral", "T5"}
EACH = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.thorough, id=name.replace(" ", "_"))
    for name in ARCHITECTURES
]


def sample_of(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value[:2] for name, value in batch.items()}


def attached(model: nn.Module, batch: dict[str, Any], schedule: str = "1f1b", stages: int = 2, **options: Any) -> Pipe:
    """Four micro-batches, and stages with equally many units."""
    units = len(Cuttable(model, sample_of(batch), blocks=None, adapter=adapter_for(model)).groups)
    balance = [units // stages] * (stages - 1)
    return attach(
        model, sample_of(batch), chunks=4, schedule=schedule, devices=["cpu"] * 2,
        balance=[*balance, units - sum(balance)], **options,
    )  # fmt: skip


@pytest.mark.parametrize("name", EACH)
def test_a_step_is_that_of_the_model_itself(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model, batch = without_randomness(architecture.make()).train(), architecture.batch()
    reference, wave, names = copy.deepcopy(model), copy.deepcopy(model), list(model.state_dict())
    attached(model, batch)
    loss = model(**batch).loss
    loss.backward()
    expected = plain_backward(reference, batch, architecture.weight, 4)
    assert torch.equal(loss.detach(), expected)
    assert differences(model, reference).names == ()
    assert list(model.state_dict()) == names

    attached(wave, batch, "zb-v", 4)
    loss = wave(**batch).loss
    loss.backward()
    assert torch.equal(loss.detach(), expected)
    found = differences(wave, reference)
    assert set(found.names) <= of_several_units(wave, batch)
    assert found.worst < 1e-6

    model.eval()
    reference.eval()
    with torch.no_grad():
        parts = [reference(**part, **without_cache(reference)) for part in micro_batches(batch, 4)]
        assert torch.equal(model(**batch).logits, joined(parts))
        if architecture.generates:
            for each in (model, reference):  # with a cache, and so the losses of routers would fail
                each.config.output_router_logits = False
            given = {key: value for key, value in sample_of(batch).items() if key != "labels"}
            options = {"max_new_tokens": 4, "do_sample": False}
            assert torch.equal(model.generate(**given, **options), reference.generate(**given, **options))


def of_several_units(model: nn.Module, batch: dict[str, Tensor]) -> set[str]:
    """The parameters whose gradients are summed in another order: those that several parts use."""
    layers = to_sequential(without_forward(model), sample_of(batch))
    uses = [id(parameter) for layer in layers for parameter in {id(each): each for each in layer.parameters()}.values()]
    shared = {key for key in uses if uses.count(key) > 1}
    return {name for name, parameter in model.named_parameters() if id(parameter) in shared}


def without_forward(model: nn.Module) -> nn.Module:
    """The model as it was before a pipe was attached."""
    del model.__dict__["forward"]
    return model


@pytest.mark.parametrize("name", EACH)
def test_with_dropout_it_is_the_sequential_of_parts_for_each_cut(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model, batch = architecture.make().train(), architecture.batch()
    other, reference = copy.deepcopy(model), copy.deepcopy(model)
    losses = []
    for each, stages in ((model, 2), (other, 4)):
        attached(each, batch, "1f1b" if stages == 2 else "zb-v", stages)
        torch.manual_seed(5)
        losses.append(each(**batch).loss)
        losses[-1].backward()
    assert torch.equal(*losses)
    found = differences(other, model)
    assert set(found.names) <= of_several_units(other, batch)
    assert found.worst < 1e-6

    layers = to_sequential(reference, sample_of(batch))
    torch.manual_seed(5)
    key = draw_key()
    parts = micro_batches(batch, 4)
    weights = [float(architecture.weight(part["labels"])) for part in parts]
    total = torch.zeros(())
    for number, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        with micro_batch_random(layers, key, number):
            value = layers[0](**part)
            for layer in layers[1:]:
                value = layer(value)
            loss = value.loss * (weight / sum(weights))
        loss.backward()
        total = total + loss.detach()
    assert torch.equal(losses[0].detach(), total)
    assert set(differences(model, reference).names) <= of_several_units(model, batch)


def llama() -> Any:
    torch.manual_seed(0)
    return ARCHITECTURES["Llama"].make().train()


def test_a_tuple_in_place_of_a_dict() -> None:
    model = llama()
    attached(model, text())
    loss, logits = model(**text(), return_dict=False)
    assert torch.equal(loss, model(**text()).loss)
    assert logits is None
    with torch.no_grad():
        loss, logits = model.eval()(**text(), return_dict=False)
    assert logits.shape[0] == len(text()["labels"])


def test_what_is_saved_after_training_is_read_as_ever(tmp_path: Path) -> None:
    model, reference, batch = llama(), llama(), text()
    attached(model, batch)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, reference)]
    model(**batch).loss.backward()
    plain_backward(reference, batch, next_tokens, 4)
    for optimizer in optimizers:
        optimizer.step()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    for key, value in reference.state_dict().items():
        assert torch.equal(again.state_dict()[key], value)


def test_rows_that_are_not_divisible_and_positional_arguments() -> None:
    model, reference = llama(), llama()
    attached(model, text())
    batch = {name: value[:7] for name, value in text().items()}
    loss = model(batch["input_ids"], batch["attention_mask"], labels=batch["labels"]).loss
    loss.backward()
    assert torch.equal(loss.detach(), plain_backward(reference, batch, next_tokens, 4))
    assert differences(model, reference).names == ()


def test_a_batch_encoding_is_a_sample_and_a_batch() -> None:
    model, batch = llama(), transformers.BatchEncoding(text())
    attach(model, batch, chunks=4, balance=[3, 4], devices=["cpu"] * 2)
    assert model(**batch).loss.requires_grad


def test_without_labels_the_model_gives_its_logits_and_does_not_train() -> None:
    model, reference, batch = llama(), llama(), text()
    attached(model, batch)
    del batch["labels"]
    with pytest.raises(ValueError, match="LlamaForCausalLM was called in training without 'labels'"):
        model(**batch)
    with torch.no_grad():
        expected = joined([reference(**part, use_cache=False) for part in micro_batches(batch, 4)])
        assert torch.equal(model(**batch).logits, expected)
        model.eval()
        assert torch.equal(model(**batch).logits, expected)


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_what_a_pipe_does_not_return_is_refused(name: str) -> None:
    model, batch = llama(), text()
    attached(model, batch)
    with pytest.raises(ValueError, match=f"returns the loss and the logits of LlamaForCausalLM, and {name}=True was"):
        model(**batch, **{name: True})


@pytest.mark.parametrize("name", ["Llama", "Mixtral", "ViT"])
def test_a_number_of_items_counts_as_without_a_pipe(name: str) -> None:
    """Trainers give it, for all mini-batches of a step of the optimizer; a micro-batch divides by its share."""
    architecture = ARCHITECTURES[name]
    model, batch = without_randomness(architecture.make()).train(), architecture.batch()
    reference, whole = copy.deepcopy(model), copy.deepcopy(model)
    attached(model, batch)
    counts = [float(architecture.weight(part["labels"])) for part in micro_batches(batch, 4)]
    for items in (sum(counts), 100, torch.tensor(90.0)):
        model.zero_grad()
        reference.zero_grad()
        loss = model(**batch, num_items_in_batch=items).loss
        loss.backward()
        total = torch.zeros(())
        for part, count in zip(micro_batches(batch, 4), counts, strict=True):
            share = float(items) / sum(counts) * torch.tensor(int(count))
            part_loss = reference(**part, **without_cache(reference), num_items_in_batch=share).loss
            part_loss = part_loss * (count / sum(counts))
            part_loss.backward()
            total = total + part_loss.detach()
        assert torch.equal(loss.detach(), total)
        assert differences(model, reference).names == ()
        expected = whole(**batch, **without_cache(whole), num_items_in_batch=torch.as_tensor(items)).loss
        torch.testing.assert_close(loss, expected, rtol=1e-2 if name == "Mixtral" else 1e-6, atol=0)  # routers' loss
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(
            model(**batch, num_items_in_batch=100).loss * 100 / sum(counts), model(**batch).loss, rtol=1e-2, atol=0
        )
        del batch["labels"]
        assert model(**batch, num_items_in_batch=torch.tensor(9)).loss is None


def test_labels_that_do_not_count_at_all() -> None:
    model, batch = llama(), text()
    attached(model, batch)
    batch["labels"][:2] = -100  # one micro-batch
    expected = model(**batch).loss
    torch.testing.assert_close(model(**batch, num_items_in_batch=next_tokens(batch["labels"])).loss, expected)
    batch["labels"].fill_(-100)
    assert model(**batch, num_items_in_batch=torch.tensor(0)).loss.isnan()


def test_a_loss_outside_of_the_model_under_a_schedule_that_allows_it() -> None:
    model, reference, batch = llama(), llama(), text()
    attached(model, batch, "gpipe")
    labels = batch.pop("labels")
    for each in (model, reference):
        logits = each(**batch).logits
        nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1
        ).backward()
    assert differences(model, reference).worst < 1e-5


def test_a_tuple_instead_of_a_dict() -> None:
    model, reference, batch = llama(), llama(), text()
    attached(model, batch)
    expected = plain_backward(reference, batch, next_tokens, 4)
    assert torch.equal(model(**batch, return_dict=False)[0].detach(), expected)
    model.eval()
    with torch.no_grad():
        loss, logits = model(**batch, return_dict=False)[:2]
        assert torch.equal(logits, model(**batch).logits)
    assert torch.equal(loss, expected)


def test_gradient_checkpointing_is_refused_and_the_message_says_what_to_choose() -> None:
    model, batch = llama(), text()
    what = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"  # transformers 5.17
    getattr(model, f"{what}_checkpointing_enable")()
    with pytest.raises(ValueError, match=r"gradient_checkpointing_disable\(\), and choose attach.*checkpoint='always'"):
        attached(model, batch)
    getattr(model, f"{what}_checkpointing_disable")()
    attached(model, batch)
    with pytest.raises(RuntimeError, match=r"a pipe is attached to this LlamaForCausalLM.*checkpoint='always'"):
        model.gradient_checkpointing_enable()


def test_a_call_with_a_cache_is_the_models_own() -> None:
    model, batch = llama().eval(), text()
    attached(model, batch)
    name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(batch["input_ids"], use_cache=False, **{name: cache})
    assert cache.get_seq_length() == batch["input_ids"].shape[1]


@pytest.mark.thorough
def test_a_loss_that_is_a_sum_over_rows_is_refused() -> None:
    config = transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=20,
        conv_dim=[16] * 7, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, ctc_loss_reduction="sum",
        apply_spec_augment=False, layerdrop=0.0,
    )  # fmt: skip
    model = transformers.Wav2Vec2ForCTC(config).train()
    batch = {"input_values": torch.randn(4, 4000), "labels": torch.randint(1, 20, (4, 3))}
    with pytest.raises(ValueError, match=r"is a sum over the rows.*ctc_loss_reduction = 'mean'"):
        attach(model, batch, devices=["cpu"])
    model.config.layerdrop = 0.1
    with pytest.raises(ValueError, match="decides with random numbers which units it calls"):
        attach(model, batch, devices=["cpu"])


def test_losses_of_routers_are_those_of_micro_batches() -> None:
    """They are about the balance within what a router sees, and so another number for each cut of a mini-batch."""
    model, batch = without_randomness(ARCHITECTURES["Mixtral"].make()).eval(), text()
    model.router_aux_loss_coef = 10.0
    reference = copy.deepcopy(model)
    with torch.no_grad():
        whole = reference(**sample_of(batch)).loss
        rows = [reference(**{name: value[n : n + 1] for name, value in batch.items()}) for n in (0, 1)]
    counts = next_tokens(batch["labels"][:1]), next_tokens(batch["labels"][1:2])
    assert abs(whole - (rows[0].loss * counts[0] + rows[1].loss * counts[1]) / sum(counts)) > 1e-2
    attached(model, batch)
    assert torch.equal(model(**batch).loss.detach(), plain_backward(reference, batch, next_tokens, 4))
    other = without_randomness(ARCHITECTURES["Mixtral"].make()).eval()
    other.lm_head.weight.data *= 100.0  # so that rows have very different losses
    with pytest.raises(ValueError, match=r"the weighted mean of its losses .*such as tokens that count"):
        attached(other, batch, loss_weight=len)


def test_a_contrastive_loss_is_refused() -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2
    }  # fmt: skip
    model = transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config={
                **sizes,
                "vocab_size": 99,
                "max_position_embeddings": 16,
                "bos_token_id": 0,
                "eos_token_id": 98,
            },
            vision_config={**sizes, "image_size": 16, "patch_size": 8},
            projection_dim=8,
        )
    )
    ids = torch.randint(3, 99, (8, 7))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(8, 3, 16, 16)}
    sample = {**sample_of(batch), "return_loss": True}
    with pytest.raises(
        ValueError, match=r"of CLIPModel for 2 rows .*with 0, .*contrastive loss.*without 'return_loss'"
    ):
        attach(model, sample, target="return_loss", chunks=4, devices=["cpu"] * 2)
