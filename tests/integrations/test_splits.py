"""Models of vision and language, and packed sequences, in mini-batches that their rows alone do not cut."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn

from pipework import Chunk, attach
from pipework.integrations.splits import split_for
from tests.integrations.comparing import differences, next_tokens, units_of, without_cache

PLACEHOLDER, VIDEO, TOKENS = 98, 97, 18
OF_ROWS = [[0, 1], [], [2], [], [], [], [3], [4, 5, 0]]  # images of each row; the rows 4 and 5 have none
TEXT: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WIDTHS: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24}
VISION = {**WIDTHS, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
GRID = {**WIDTHS, "depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 1}
WIDE = {**GRID, "out_hidden_size": 32}
MROPE = {**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
CLIP = {**VISION, "model_type": "clip_vision_model", "patch_size": 8}
LLAMA = {**TEXT, "model_type": "llama"}
MISTRAL = {**TEXT, "model_type": "mistral", "head_dim": 8}
RESAMPLER = {
    "hidden_size": 32, "num_key_value_heads": 2, "resampler_n_latents": 4, "resampler_depth": 1,
    "resampler_n_heads": 4, "resampler_head_dim": 8,
}  # fmt: skip


class Image(NamedTuple):
    """The entries of an image in the arguments of a model, and how many placeholders it has."""

    entries: dict[str, Tensor]
    placeholders: int


def picture(number: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


def in_patches(number: int) -> Image:
    grid = torch.tensor([[1, 2 + 2 * (number % 2), 4]])
    patches = int(grid.prod())
    return Image({"pixel_values": picture(number, patches, 48), "image_grid_thw": grid}, patches // 4)


def in_squares(number: int) -> Image:
    return Image({"pixel_values": picture(number, 1, 3, 16, 16)}, 4)


def in_sizes(number: int) -> Image:
    sizes = torch.tensor([[16, 8 + 8 * (number % 2)]])
    return Image({"pixel_values": picture(number, 1, 3, 16, 16), "image_sizes": sizes}, 2 + 2 * (number % 2))


class Family(NamedTuple):
    """A kind of models: its class and configuration, its images, and whether images are padded to those of a row."""

    kind: str
    config: dict[str, Any]
    image: Any = in_squares
    padded: bool = False


CASES = {
    "qwen2_vl": Family(
        "Qwen2VL", {"text_config": MROPE, "vision_config": {**GRID, "embed_dim": 16, "hidden_size": 32}}, in_patches
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VL",
        {"text_config": MROPE, "vision_config": {**WIDE, "window_size": 16, "fullatt_block_indexes": [1]}},
        in_patches,
    ),
    "qwen3_vl": Family(
        "Qwen3VL",
        {
            "text_config": {**MROPE, "head_dim": 8},
            "vision_config": {**WIDE, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        },
        in_patches,
    ),
    "glm4v": Family("Glm4v", {"text_config": MROPE, "vision_config": {**WIDE, "image_size": 16}}, in_patches),
    "gemma3": Family(
        "Gemma3", {"text_config": {**TEXT, "head_dim": 8}, "vision_config": VISION, "mm_tokens_per_image": 4}
    ),
    "internvl": Family("InternVL", {"text_config": {"model_type": "qwen2", **TEXT}, "vision_config": VISION}),
    "llava": Family(
        "Llava", {"text_config": LLAMA, "vision_config": {**VISION, "model_type": "clip_vision_model", "patch_size": 8}}
    ),
    "mistral3": Family(
        "Mistral3",
        {"text_config": MISTRAL, "vision_config": {"model_type": "pixtral", **VISION}, "spatial_merge_size": 2},
        in_sizes,
    ),
    "idefics2": Family(
        "Idefics2", {"text_config": MISTRAL, "vision_config": VISION, "perceiver_config": RESAMPLER}, padded=True
    ),
    "idefics3": Family("Idefics3", {"text_config": LLAMA, "vision_config": VISION, "scale_factor": 2}, padded=True),
    "smolvlm": Family("SmolVLM", {"text_config": LLAMA, "vision_config": VISION, "scale_factor": 2}, padded=True),
}


def model_of(family: Family) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family.kind}Config")(**family.config, image_token_id=PLACEHOLDER)
    return getattr(transformers, f"{family.kind}ForConditionalGeneration")(config)  # type: ignore[no-any-return]


def batch_of(family: Family, rows: list[int]) -> dict[str, Any]:
    """What a processor makes of some rows: their images lie one behind the other."""
    ids = torch.randint(3, 90, (8, TOKENS), generator=torch.Generator().manual_seed(1))[rows]
    for row, images in zip(ids, (OF_ROWS[row] for row in rows), strict=True):
        place = 1
        for number in images:
            count = family.image(number).placeholders
            row[place : place + count] = PLACEHOLDER
            place += count + 1
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    batch["labels"] = ids.masked_fill((ids == PLACEHOLDER) | (ids % 5 == 0), -100)
    if family.image is in_patches:
        batch["mm_token_type_ids"] = (ids == PLACEHOLDER).int()
    if family.kind == "Gemma3":
        batch["token_type_ids"] = (ids == PLACEHOLDER).long()
    images = [family.image(number).entries for row in rows for number in OF_ROWS[row]]
    if family.padded:
        padded = torch.zeros(len(rows), 3, 3, 16, 16)
        for row, numbers in zip(padded, (OF_ROWS[row] for row in rows), strict=True):
            for place, number in enumerate(numbers):
                row[place] = family.image(number).entries["pixel_values"][0]
        return {**batch, "pixel_values": padded if images else None}
    names = family.image(0).entries
    return {**batch, **{name: torch.cat([each[name] for each in images]) if images else None for name in names}}


def cases(first: str, *thorough: str) -> list[Any]:
    """Families: `make test` trains the first, CI those that are named here, and the others are slow."""
    marks = {first: (), **dict.fromkeys(thorough, pytest.mark.thorough)}
    return [pytest.param(name, marks=marks.get(name, pytest.mark.slow)) for name in CASES]


@pytest.mark.parametrize("name", cases("qwen2_5_vl", "gemma3", "idefics3"))
def test_images_go_with_their_rows(name: str) -> None:
    family = CASES[name]
    model = model_of(family)
    reference = copy.deepcopy(model)
    sample = batch_of(family, [6, 0, 2])
    # The last four groups are those of the text. Vision is cut, too, but for that of Idefics: its blocks are no units,
    # and a cut inside of a block adds gradients in another order.
    vision = units_of(model, sample) - 4
    balance = [vision, 4] if family.padded else [3, vision - 3, 4]
    pipe = attach(model, sample, chunks=4, balance=balance, devices=["cpu"] * len(balance))
    batch, parts = batch_of(family, [*range(8)]), [batch_of(family, [row, row + 1]) for row in (0, 2, 4, 6)]
    assert parts[2]["pixel_values"] is None
    loss = model.train()(**batch).loss
    loss.backward()
    total, weights = torch.zeros(()), [float(next_tokens(part["labels"])) for part in parts]
    for part, weight in zip(parts, weights, strict=True):
        own = reference.train()(**part, **without_cache(reference)).loss * (weight / sum(weights))
        own.backward()
        total = total + own.detach()
    assert torch.equal(loss.detach(), total)
    assert differences(model, reference).names == ()
    with torch.no_grad():
        output = model.eval()(**batch)
        results = [reference.eval()(**part, **without_cache(reference)) for part in parts]
    assert "logits" in output
    for key in output.keys() - {"loss"}:
        there = [each[key] for each in results if each.get(key) is not None]
        if isinstance(there[0], Tensor):
            assert torch.equal(output[key], torch.cat(there))
    assert pipe.verify(**batch)


def test_images_need_images_in_the_sample() -> None:
    family = CASES["gemma3"]
    model, batch = model_of(family), batch_of(family, [0, 2, 6, 7])
    attach(model, {name: batch[name] for name in ("input_ids", "labels")}, chunks=2, devices=["cpu", "cpu"])
    with pytest.raises(
        ValueError, match=r"batch with 'pixel_values', and the sample .* alone: the sample needs images"
    ):
        model(**batch)


@pytest.mark.thorough
def test_a_trainer_needs_no_other_collator(tmp_path: Path) -> None:
    def trained(*, piped: bool) -> list[float]:
        model = model_of(CASES["llava"])
        if piped:
            attach(model, batch_of(CASES["llava"], [6, 0, 2, 3]), chunks=4, devices=["cpu"] * 2)
        options = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "remove_unused_columns": False}
        settings = transformers.TrainingArguments(
            str(tmp_path), max_steps=2, per_device_train_batch_size=8, per_device_eval_batch_size=8, logging_steps=1,
            save_strategy="no", learning_rate=1e-3, **options,
        )  # fmt: skip
        data: Any = [*range(8)]
        trainer = transformers.Trainer(
            model, settings, train_dataset=data, eval_dataset=data,
            data_collator=lambda rows: batch_of(CASES["llava"], sorted(rows)),
        )  # fmt: skip
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        predicted = trainer.predict(data)
        return [*(each["loss"] for each in trainer.state.log_history if "loss" in each), predicted.metrics["test_loss"]]

    torch.testing.assert_close(trained(piped=True), trained(piped=False))


def counts_of(kind: str, sample: dict[str, Any], chunks: int) -> list[list[Any]]:
    """The entries of each argument but the tokens in each micro-batch."""
    config = SimpleNamespace(
        model_type=kind, image_token_id=PLACEHOLDER, video_token_id=VIDEO,
        vision_config=SimpleNamespace(spatial_merge_size=2, patch_size=4),
    )  # fmt: skip
    split = split_for(config, sample, "labels")
    assert split is not None
    pieces = [named for _, named, _ in split((), sample, None, chunks)]
    return [[None if each[name] is None else len(each[name]) for name in sample] for each in pieces]


def test_videos_are_cut_beside_images() -> None:
    row = [5] * 6
    sample = {
        "input_ids": torch.tensor([[PLACEHOLDER, *[VIDEO] * 4, 5], row, [VIDEO] * 2 + [5] * 4]),
        "pixel_values": torch.ones(4, 48),
        "image_grid_thw": torch.tensor([[1, 2, 2]]),
        "pixel_values_videos": torch.ones(24, 48),
        "video_grid_thw": torch.tensor([[2, 2, 4], [1, 2, 4]]),
        "second_per_grid_ts": [0.5, 1.0],
    }
    assert counts_of("qwen2_5_vl", sample, 3) == [[1, 4, 1, 16, 1, 1], [1, *[None] * 5], [1, None, None, 8, 1, 1]]
    kinds = torch.tensor([[1, 2, 2, 2, 2, 0], [0] * 6, [2, 2, 0, 0, 0, 0]])  # GLM has one placeholder for both
    named = {**sample, "input_ids": sample["input_ids"].masked_fill(kinds > 0, PLACEHOLDER), "mm_token_type_ids": kinds}
    assert counts_of("glm4v", named, 2) == [[2, 4, 1, 16, 1, 1, 2], [1, None, None, 8, 1, 1, 1]]


@pytest.mark.parametrize(("images", "first", "second"), [(2, 3, 1), (3, 3, 1), (5, 3, 1), (2, 0, 0)])
def test_images_of_no_row_are_refused(images: int, first: int, second: int) -> None:
    ids = torch.tensor([[PLACEHOLDER] * count + [5] * (4 - count) for count in (first, second)])
    sample = {"input_ids": ids, "pixel_values": torch.ones(images, 3, 5, 5)}
    wanted = rf"which of the {images} images in 'pixel_values' belong to which row.*image_token_id = 98.*with split="
    with pytest.raises(ValueError, match=wanted):
        counts_of("gemma3", sample, 2)


def test_marks_in_the_sample_and_other_models_are_cut_along_rows() -> None:
    sample = {"input_ids": torch.full((2, 3), PLACEHOLDER), "pixel_values": torch.ones(2, 3, 4, 4)}
    config = SimpleNamespace(model_type="gemma3", image_token_id=PLACEHOLDER)
    assert split_for(config, {**sample, "pixel_values": Chunk(sample["pixel_values"])}, "labels") is None
    assert split_for(config, {"input_ids": sample["input_ids"]}, "labels") is None
    assert split_for(SimpleNamespace(model_type="clip"), sample, "labels") is None
