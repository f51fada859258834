"""Tiny models of the auto classes of transformers, each with a mini-batch with which it can be trained."""

from __future__ import annotations

import collections
import copy
import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from pipework.model.parts.outputs import tensors_by_name
from tests.integrations.comparing import without_cache
from tests.integrations.shrinking import LABELS, VOCABULARY, completed, tiny_configs

CHUNKS = 4
ROWS = 8
LARGEST = 60_000_000  # parameters of a tiny model
SEARCH = 20.0  # seconds for a configuration that can be trained


@dataclass(frozen=True)
class Task:
    """An auto class.

    Attributes:
        mapping: the name of its table in transformers.
        labels: what its models take as labels; None: they compute no loss, or take boxes or maps for it.
    """

    mapping: str
    labels: Callable[[], Tensor] | None = None


def _tokens(length: int = 12, holes: bool = True) -> Tensor:
    labels = torch.randint(4, VOCABULARY, (ROWS, length), generator=torch.Generator().manual_seed(2))
    if holes:
        labels[::2, length - 3 :] = -100
        labels[0, :4] = -100
    return labels


def _classes() -> Tensor:
    return torch.arange(ROWS) % LABELS


def _token_classes() -> Tensor:
    labels = _tokens()
    return labels.where(labels == -100, labels % LABELS)


TASKS = {
    "causal LM": Task("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", _tokens),
    "masked LM": Task("MODEL_FOR_MASKED_LM_MAPPING_NAMES", _tokens),
    "sequence classification": Task("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", _classes),
    "token classification": Task("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES", _token_classes),
    "sequence to sequence": Task("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", lambda: _tokens(7)),
    "image classification": Task("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", _classes),
    "audio classification": Task("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", _classes),
    "speech, CTC": Task("MODEL_FOR_CTC_MAPPING_NAMES", lambda: _tokens(5, holes=False)),
    "speech to text": Task("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", lambda: _tokens(7)),
    "base model": Task("MODEL_MAPPING_NAMES"),
    "question answering": Task("MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES"),
    "semantic segmentation": Task("MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES"),
    "depth estimation": Task("MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES"),
    "object detection": Task("MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES"),
}


def classes(task: str) -> list[tuple[str, str]]:
    """Model types and the names of their classes."""
    found = []
    for model_type, names in getattr(modeling_auto, TASKS[task].mapping).items():
        found += [(model_type, name) for name in ([names] if isinstance(names, str) else names)]
    return found


def built(task: str, model_type: str, name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A tiny model that can be trained without a pipe, and a mini-batch for it.

    Raises:
        ValueError: none was found; the message has the last reason.
    """
    kind, reason, began = getattr(transformers, name), "", time.perf_counter()
    failures: collections.Counter[str] = collections.Counter()
    of_type, of_class = CONFIG_MAPPING[model_type], getattr(kind, "config_class", None)
    is_part = of_class is not of_type and of_class in (of_type.sub_configs or {}).values()  # as `from_config` does
    configs = iter(tiny_configs(of_class if is_part else of_type))
    while time.perf_counter() < began + SEARCH:
        try:
            config = next(configs, None)
        except Exception as error:  # its defaults do not fit together
            raise ValueError(said(error)) from None
        if config is None:
            break
        if task.startswith("speech, CTC"):
            config.ctc_loss_reduction = "mean"
        if task == "sequence classification":
            config.problem_type = "single_label_classification"
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = 0
        try:
            size = parameters_of(kind, config)
            if size > LARGEST:
                reason = reason or f"{size // 1_000_000} million parameters in the tiny configuration"
                continue
            torch.manual_seed(0)
            return trained_once(task, kind(config).train())
        except Exception as error:
            reason = reason or said(error)
            failures[said(error)] += 1
            if max(failures.values()) >= 6 and "input_ids" not in kind.main_input_name:
                break  # no configuration will help
    raise ValueError(reason or "no tiny configuration")


def parameters_of(kind: type[nn.Module], config: PreTrainedConfig) -> int:
    """How many parameters a model has; completes its configuration."""
    for _ in range(3):
        try:
            with torch.device("meta"):
                return sum(parameter.numel() for parameter in kind(copy.deepcopy(config)).parameters())
        except Exception as error:
            if not completed(config, error):
                raise
    raise ValueError("the configuration lacks too much")


def trained_once(task: str, model: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model, and a mini-batch with which it can be trained."""
    failed: Exception | None = None
    for batch in mini_batches(task, model):
        try:
            trial = copy.deepcopy(model)
            sample = {each: value[: ROWS // CHUNKS] for each, value in batch.items()}
            output = trial(**sample, **without_cache(trial))
            loss = output.loss if "labels" in batch else _sum(output)
            if loss is None:
                raise ValueError("computes no loss")
            loss.backward()
            if not any(parameter.grad is not None for parameter in trial.parameters()):
                raise ValueError("no parameter gets a gradient")
            return model, batch
        except Exception as error:
            failed = failed or error
    raise failed or ValueError("no mini-batch is known")


def _sum(output: Any) -> Tensor:
    """The sum of all numbers that a model returns and that need a gradient."""
    return sum((each.float().sum() for each in tensors_by_name(output).values() if each.requires_grad), torch.zeros(()))


def mini_batches(task: str, model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Mini-batches that a model may take."""
    labels_of = TASKS[task].labels
    if labels_of is not None:
        yield from _with_labels(task, model, labels_of())
        return
    for batch in _with_labels(task, model, _tokens()):
        del batch["labels"]
        if model.config.is_encoder_decoder and "decoder_input_ids" in inspect.signature(type(model).forward).parameters:
            batch["decoder_input_ids"] = _tokens(7, holes=False)
        yield batch


def _with_labels(task: str, model: nn.Module, labels: Tensor) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    name = model.main_input_name
    if name == "input_ids":
        length = labels.shape[1] if labels.dim() == 2 and "seq" not in task.split()[0] else 12
        ids = torch.randint(4, VOCABULARY, (ROWS, length), generator=generator)
        mask = torch.ones_like(ids)
        for row in range(ROWS):
            mask[row, length - row % 4 :] = 0
        if task == "sequence classification":
            ids[torch.arange(ROWS), mask.sum(1) - 1] = 1  # the end, whose hidden state some models classify
        padded = ids.masked_fill(mask == 0, 2)
        if task == "token classification":
            labels = labels.masked_fill(mask == 0, -100)  # some models leave them out by the mask
        if task == "causal LM":
            labels = padded.masked_fill(mask == 0, -100)
            labels[0, :5] = -100
        yield {"input_ids": padded, "attention_mask": mask, "labels": labels}
        yield {"input_ids": ids, "labels": labels.where(labels != -100, 5) if task == "causal LM" else labels}
        vision = getattr(model.config, "vision_config", None)
        if "pixel_values" in inspect.signature(type(model).forward).parameters and vision is not None:
            pixels = torch.randn(ROWS, 3, vision.image_size, vision.image_size, generator=generator)
            yield {"input_ids": padded, "attention_mask": mask, "pixel_values": pixels, "labels": labels}
        return
    size = getattr(model.config, "image_size", 32)
    size = size if isinstance(size, int) else size[0] if isinstance(size, (list, tuple)) else 32
    fields = ("feature_projection_input_dim", "num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels")
    configs = [model.config, *(each for each in vars(model.config).values() if isinstance(each, PreTrainedConfig))]
    mels = next((vars(config)[each] for config in configs for each in fields if each in vars(config)), 16)
    positions = getattr(model.config, "max_source_positions", 32)
    shapes = {
        "pixel_values": [(3, each, each) for each in dict.fromkeys((size, 32, 64, 224))],
        "input_values": [
            (4000,), (1, 4000), (getattr(model.config, "max_length", 128), mels), (128, 32), (1024, 128),
        ],
        "input_features": [(mels, 2 * positions), (64, mels), (2 * positions, mels), (4000,), (mels, 64), (128, 3000)],
    }.get(name, [])  # fmt: skip
    for shape in shapes:
        yield {name: torch.randn(ROWS, *shape, generator=generator), "labels": labels}


def said(error: BaseException) -> str:
    """The first line of an error."""
    line = next((each.strip() for each in str(error).splitlines() if each.strip()), "")
    return f"{type(error).__name__}: {line[:600]}"
