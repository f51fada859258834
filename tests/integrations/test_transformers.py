"""Models of transformers, trained by a pipe that is attached to them, beside untouched copies."""

import copy
import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from pipework import Pipe
from pipework.attached import attach
from pipework.integrations.splits import split_for
from pipework.model.parts.leaves import tensors_in
from tests.integrations.architectures import ARCHITECTURES, text
from tests.integrations.comparing import (
    differences,
    joined,
    next_tokens,
    plain_backward,
    returns_all,
    units_of,
    without_cache,
    without_randomness,
)
from tests.model.parts.harness import micro_batches

# PEFT asks transformers by an older name.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing. is deprecated:FutureWarning")


def cases(*thorough: str, others: Iterable[str] = ()) -> list[Any]:
    """Architectures: `make test` trains a Llama, CI those that are named here, and the others are slow."""
    marked = [("Llama", ()), *((name, pytest.mark.thorough) for name in thorough)]
    marked += [(name, pytest.mark.slow) for name in others if name not in ("Llama", *thorough)]
    return [pytest.param(name, marks=marks, id=name.replace(" ", "_")) for name, marks in marked]


def sample_of(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value[:2] for name, value in batch.items()}


def attached(model: nn.Module, batch: dict[str, Any], schedule: str = "1f1b", stages: int = 2, **options: Any) -> Pipe:
    """Four micro-batches, and stages with equally many units."""
    sample = sample_of(batch)
    units = units_of(model, sample)
    balance = [units // stages] * (stages - 1)
    options |= {"balance": [*balance, units - sum(balance)], "devices": ["cpu"] * 2}
    return attach(model, sample, chunks=4, schedule=schedule, **options)


@pytest.mark.parametrize(
    "name", cases("Llama, tied", "Mixtral", "T5", "Llava", "Llama with LoRA", others=ARCHITECTURES)
)
def test_a_step_is_that_of_the_model_itself(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model, batch = without_randomness(architecture.make()).train(), architecture.batch()
    reference, names = copy.deepcopy(model), list(model.state_dict())
    pipe = attached(model, batch)
    loss = model(**batch).loss
    loss.backward()
    expected = plain_backward(reference, batch, architecture.weight, 4)
    assert torch.equal(loss.detach(), expected)
    assert differences(model, reference).names == ()
    assert list(model.state_dict()) == names

    model.eval()
    reference.eval()
    with torch.no_grad():
        parts = [reference(**part, **without_cache(reference)) for part in micro_batches(batch, 4)]
        assert returns_all(model(**batch), parts, pipe)
        if architecture.generates:
            for each in (model, reference):  # with a cache, and so the losses of routers would fail
                each.config.output_router_logits = False
            given = {key: value for key, value in sample_of(batch).items() if key != "labels"}
            options = {"max_new_tokens": 4, "do_sample": False}
            assert torch.equal(model.generate(**given, **options), reference.generate(**given, **options))


@pytest.mark.parametrize("name", cases("Llama, tied", "GPT-2", "T5", "Llama with LoRA", others=ARCHITECTURES))
def test_with_dropout_it_is_the_model_itself_for_each_cut(name: str) -> None:
    architecture = ARCHITECTURES[name]
    batch = architecture.batch()
    for schedule, stages in (("1f1b", 2), ("zb-v", 4)):
        model = architecture.make().train()
        found = attached(model, batch, schedule, stages).verify(**batch)
        assert found, found
        assert all(each.difference == 0 for each in found.compared if each.what in ("outputs", "loss"))


def llama(batch: dict[str, Any] | None = None, schedule: str = "1f1b") -> Any:
    """The same at each call; with a pipe for a mini-batch."""
    torch.manual_seed(0)
    model = ARCHITECTURES["Llama"].make().train()
    if batch is not None:
        attached(model, batch, schedule)
    return model


def test_forms_of_a_call_and_what_is_saved_after_it(tmp_path: Path) -> None:
    """A number of rows that is not divisible, positional arguments, a tuple as output, an encoding as a sample."""
    model, reference, batch = llama(), llama(), {name: value[:7] for name, value in text().items()}
    attach(model, transformers.BatchEncoding(text()), chunks=4, balance=[3, 4], devices=["cpu"] * 2)
    loss, logits = model(batch["input_ids"], batch["attention_mask"], labels=batch["labels"], return_dict=False)
    loss.backward()
    assert torch.equal(loss.detach(), plain_backward(reference, batch, next_tokens, 4))
    assert logits is None
    assert differences(model, reference).names == ()
    for each in (model, reference):
        torch.optim.AdamW(each.parameters(), lr=1e-2).step()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    for key, value in reference.state_dict().items():
        assert torch.equal(again.state_dict()[key], value)
    model.eval()
    with torch.no_grad():
        loss, logits = model(**transformers.BatchEncoding(batch), return_dict=False)[:2]
        assert torch.equal(logits, model(**batch).logits)
        torch.testing.assert_close(loss, again.eval()(**batch).loss)


def test_without_labels_the_model_gives_its_logits_and_does_not_train() -> None:
    batch = text()
    model, reference = llama(batch), llama()
    del batch["labels"]
    with pytest.raises(ValueError, match="computes the loss inside and got no target"):
        model(**batch)
    with torch.no_grad():
        expected = joined([reference(**part, use_cache=False) for part in micro_batches(batch, 4)])
        assert torch.equal(model(**batch).logits, expected)
        model.eval()
        assert torch.equal(model(**batch).logits, expected)
        # A call with a cache is the model's own.
        name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
        cache = transformers.DynamicCache(config=model.config)
        model(batch["input_ids"], use_cache=False, **{name: cache})
    assert cache.get_seq_length() == batch["input_ids"].shape[1]


@pytest.mark.parametrize("name", cases("Mixtral", "ViT"))
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


@pytest.mark.thorough
def test_labels_that_do_not_count_at_all() -> None:
    batch = text()
    model = llama(batch)
    batch["labels"][:2] = -100  # one micro-batch
    expected = model(**batch).loss
    torch.testing.assert_close(model(**batch, num_items_in_batch=next_tokens(batch["labels"])).loss, expected)
    batch["labels"].fill_(-100)
    assert model(**batch, num_items_in_batch=torch.tensor(0)).loss.isnan()


@pytest.mark.thorough
def test_a_loss_outside_of_the_model_under_a_schedule_that_allows_it() -> None:
    batch = text()
    model, reference = llama(batch, "gpipe"), llama()
    labels = batch.pop("labels")[:, 1:].flatten()
    for each in (model, reference):
        logits = each(**batch).logits[:, :-1].flatten(0, 1)
        nn.functional.cross_entropy(logits, labels, label_smoothing=0.1).backward()
    assert differences(model, reference).worst < 1e-5


TEXT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
PICTURE = {**TEXT, "image_size": 16, "patch_size": 8}
IDS, PICTURES = torch.arange(56).reshape(8, 7) + 3, torch.linspace(-1, 1, 8 * 3 * 16 * 16).reshape(8, 3, 16, 16)
DECODER = {f"decoder_{name}": size for name, size in TEXT.items()}
TWO = {
    "text_config": {**TEXT, "vocab_size": 99, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 98},
    "vision_config": PICTURE,
}

# The class of a configuration and of a model, arguments of the configuration, the batch, its target if the model has a
# loss, and what it returns beside it.
RETURNED: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], str | None, list[str]]] = {
    "base model": ("BertConfig", "BertModel", TEXT, {"input_ids": IDS}, None, ["last_hidden_state", "pooler_output"]),
    "questions": (
        "BertConfig", "BertForQuestionAnswering", TEXT,
        {"input_ids": IDS, "start_positions": torch.arange(8) % 7, "end_positions": torch.arange(1, 9) % 7},
        "start_positions", ["start_logits", "end_logits"],
    ),
    "boxes": (
        "YolosConfig", "YolosForObjectDetection",
        {**PICTURE, "image_size": [16, 16], "num_detection_tokens": 5, "use_mid_position_embeddings": False},
        {"pixel_values": PICTURES}, None, ["logits", "pred_boxes", "last_hidden_state"],
    ),
    "reconstruction": (
        "ViTMAEConfig", "ViTMAEForPreTraining", {**PICTURE, **DECODER},
        {"pixel_values": PICTURES, "noise": PICTURES[:, 0, 0, :4].clone()},
        "pixel_values", ["logits", "mask", "ids_restore"],
    ),
    "text and pictures": (
        "CLIPConfig", "CLIPModel", {**TWO, "projection_dim": 8}, {"input_ids": IDS, "pixel_values": PICTURES},
        None, ["text_embeds", "image_embeds", "text_model_output", "vision_model_output"],
    ),
    "memories": ("XLNetConfig", "XLNetModel", {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 16},
        {"input_ids": IDS}, None, ["last_hidden_state", "mems"],
    ),
    "hidden states": (
        "LlamaConfig", "LlamaForCausalLM", {**TEXT, "output_hidden_states": True}, {"input_ids": IDS, "labels": IDS},
        "labels", ["logits", "hidden_states"],
    ),
    "attentions": (
        "BertConfig", "BertModel", {**TEXT, "attn_implementation": "eager"},
        {"input_ids": IDS, "output_attentions": True}, None,
        ["last_hidden_state", "pooler_output", "attentions", "cross_attentions"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [name if name == "questions" else pytest.param(name, marks=pytest.mark.thorough) for name in RETURNED]
)
@pytest.mark.filterwarnings("ignore:the pipe returns None in place of .*'logits_per_image'")
def test_what_a_model_returns_row_by_row_is_what_the_call_returns(name: str) -> None:
    config, kind, options, batch, target, names = RETURNED[name]
    options = options if "text_config" in options else {"vocab_size": 99, **options}
    model = getattr(transformers, kind)(getattr(transformers, config)(**options)).eval()
    reference = copy.deepcopy(model)
    sample = {key: value[:2] if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    usual = {"schedule": "gpipe"} if target is None else {"target": target}
    pipe = attach(model, sample, chunks=4, devices=["cpu"] * 2, **usual)
    loss = [] if target is None else ["loss"]
    with torch.no_grad():
        output = model(**batch)
        parts = [reference(**part, **without_cache(reference)) for part in micro_batches(batch, 4)]
        assert returns_all(output, parts, pipe)
        assert list(output) == loss + names
        assert type(output) is type(parts[0])
        assert len(model(**batch, return_dict=False)) == len(output)
    result = model.train()(**batch)
    if target is not None:
        assert next(iter(result)) == "loss"
        assert not tensors_in({**result, "loss": None})
        result.loss.backward()
        assert model(**batch, return_dict=False)[0].requires_grad
    else:
        assert list(result) == [each for each in names if each != "mems"]  # there are none in training
        assert pipe.verify(**batch)


@pytest.mark.thorough
def test_hidden_states_that_the_sample_did_not_have() -> None:
    model, batch = llama(text()), text()
    with pytest.raises(RuntimeError, match=r"LlamaForCausalLM takes another way .*with the same flags"):
        model(**batch, output_hidden_states=True)


@pytest.mark.thorough
def test_sequences_that_are_packed_into_one_row_are_cut_between_them() -> None:
    torch.manual_seed(0)
    ids, positions = torch.randint(3, 37, (1, 21)), torch.cat([torch.arange(n) for n in (5, 3, 6, 2, 5)])[None]
    batch = {"input_ids": ids, "position_ids": positions, "labels": ids.where(positions > 0, -100)}
    offsets = torch.tensor([0, 5, 8, 14, 16, 21], dtype=torch.int32)
    given = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 6, "max_length_k": 6}
    pieces = [{name: value[:, cut] for name, value in batch.items()} for cut in (slice(8), slice(8, 14), slice(14, 21))]
    for more, own in (({}, [{}] * 3), (given, [flash([0, 5, 8], 5), flash([0, 6], 6), flash([0, 2, 7], 5)])):
        model, reference = llama(), llama()
        attach(model, {**batch, **more}, chunks=3, devices=["cpu"] * 2)
        loss = model(**batch, **more).loss
        loss.backward()
        total, weights, logits = torch.zeros(()), [float(next_tokens(piece["labels"])) for piece in pieces], []
        for piece, named, weight in zip(pieces, own, weights, strict=True):
            output = reference(**piece, **named, use_cache=False)
            part = output.loss * (weight / sum(weights))
            part.backward()
            total = total + part.detach()
            logits.append(output.logits)
        assert torch.equal(loss.detach(), total)
        assert differences(model, reference).names == ()
        torch.testing.assert_close(loss, llama()(**batch, use_cache=False).loss)
        with torch.no_grad():
            assert torch.equal(model.eval()(**batch, **more).logits, torch.cat(logits, 1))
    with pytest.raises(ValueError, match=r"had sequences that are packed .* this batch has not: .*with split="):
        model(input_ids=ids, labels=ids)
    (_, first, _), *_ = split_for(model.config, {**batch, **given}, "labels")((), {**batch, **given}, None, 3)  # type: ignore[misc]
    assert first["cu_seq_lens_k"].tolist() == [0, 5, 8]
    assert first["max_length_q"] == 5
    began_before = {"input_ids": ids, "position_ids": torch.cat([torch.tensor([[2, 3]]), positions[:, 2:]], 1)}
    pieces = split_for(model.config, began_before, "labels")((), began_before, None, 3)  # type: ignore[misc]
    assert torch.equal(torch.cat([piece["input_ids"] for _, piece, _ in pieces], 1), ids)
    model = llama()
    others = {"input_ids": ids, "position_ids": positions}
    attach(model, others, chunks=3, devices=["cpu"] * 2, loss_fn=of_tokens, loss_weight=torch.numel)
    loss, output = model(**others, target=ids, return_output=True)
    torch.testing.assert_close(loss, of_tokens(output, ids))


def of_tokens(output: Any, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.logits[0], target[0])


def flash(offsets: list[int], longest: int) -> dict[str, Any]:
    """The arguments of flash attention for packed sequences."""
    begins = torch.tensor(offsets, dtype=torch.int32)
    return {"cu_seq_lens_q": begins, "cu_seq_lens_k": begins, "max_length_q": longest, "max_length_k": longest}


def test_gradient_checkpointing_is_refused_and_the_message_says_what_to_choose() -> None:
    model, batch = llama(), text()
    what = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"  # transformers 5.17
    told = r"LlamaForCausalLM recomputes.*gradient_checkpointing_disable\(\), and choose attach.*checkpoint='always'"
    for use in (lambda: attached(model, batch), lambda: model(**batch)):  # before the pipe is attached, and after
        getattr(model, f"{what}_checkpointing_enable")()
        with pytest.raises(ValueError, match=told):
            use()
        getattr(model, f"{what}_checkpointing_disable")()
        if "forward" not in vars(model):
            attached(model, batch)
    assert model(**batch).loss.requires_grad


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
    model.config.ctc_loss_reduction = "mean"  # over rows, whatever padding they have
    attach(model, batch, chunks=2, devices=["cpu"])
    batch["labels"][3, 1:] = -100
    model.eval()  # without dropout
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).loss, type(model).forward(model, **batch).loss)
    del model.forward
    model.config.layerdrop = 0.1
    with pytest.raises(ValueError, match="decides with random numbers which units it calls"):
        attach(model, batch, devices=["cpu"])


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_a_contrastive_loss_is_refused() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    text_config = {**sizes, "vocab_size": 99, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 98}
    vision_config = {**sizes, "image_size": 16, "patch_size": 8}
    model = transformers.CLIPModel(
        transformers.CLIPConfig(text_config=text_config, vision_config=vision_config, projection_dim=8)
    )
    ids = torch.randint(3, 99, (2, 7))
    sample = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 16, 16), "return_loss": True}
    with pytest.raises(
        ValueError, match=r"of CLIPModel for 2 rows .*with 0, .*contrastive loss.*without 'return_loss'"
    ):
        attach(model, sample, target="return_loss", chunks=4, devices=["cpu"] * 2)
