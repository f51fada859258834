"""A Llama of 1.2 billion parameters, as transformers has it, with a pipe attached."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import pipework
from benchmarks.gpu import parts
from benchmarks.gpu.card import Card
from benchmarks.gpu.measure import Case
from benchmarks.gpu.task import training_flops
from benchmarks.gpu.ways import GRAPHS, Way, as_graph, plain

ROWS = 8  # as many micro-batches
SHORT = 128


def llama(card: Card) -> Case | None:
    """The plain model, and the same with a pipe of one stage, and of two on halves of the card, or on the CPU.

    None, and a line of text, where transformers is not installed.
    """
    return _case(card, captured=False)


def llama_graphs(card: Card) -> Case | None:
    """The same with graphs of actions, and the plain model as a graph."""
    return _case(card, captured=True)


@dataclass(frozen=True)
class Llama:
    """The model and its mini-batch.

    Attributes:
        card: where it runs; on the CPU it is tiny.
        config: of transformers.
        ids: a mini-batch, whose rows are micro-batches.
    """

    card: Card
    config: Any
    ids: Tensor

    @classmethod
    def of(cls, card: Card, rows: int, tokens: int = 2048, blocks: int = 2) -> Llama | None:
        """With rows of so many tokens, and on the CPU with so many blocks.

        None, and a line of text, without transformers.
        """
        try:
            from transformers import LlamaConfig
        except ImportError:
            print("llama is left out, because transformers is not installed: pip install transformers\n")
            return None

        if card.is_gpu:
            sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
            vocabulary, groups = 128_256, 8
        else:
            sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": blocks, "num_attention_heads": 2}
            tokens, vocabulary, groups = 8, 64, 1
        config = LlamaConfig(
            vocab_size=vocabulary, num_key_value_heads=groups, tie_word_embeddings=True, use_cache=False,
            max_position_embeddings=tokens, **sizes,
        )  # fmt: skip
        draw = torch.Generator().manual_seed(1)
        return cls(card, config, torch.randint(vocabulary, (rows, tokens), generator=draw).to(card.device))

    def alone(self, part: parts.Part | None) -> Way:
        """The plain model, on a part of the card or on all of it."""
        sms, stream = (self.card.sms, None) if part is None else (part.sms, part.stream)
        return plain(_Ids(self._model()), lambda output, labels: output, len(self.ids), sms, stream)

    def attached(self, workers: int, on: Sequence[parts.Part] = (), **options: Any) -> Way:
        """With a pipe, whose workers have parts of the card if there are some; `options` are those of `attach`."""
        model, ids = self._model(), self.ids
        sample = {"input_ids": ids[:2], "labels": ids[:2]}
        settings = {"chunks": len(ids), "checkpoint": "never", "devices": [self.card.device] * workers, **options}
        pipe = pipework.attach(model, sample, **settings)
        if on:
            parts.compute_on(pipe, on)
        sms = sum(part.sms for part in on) or self.card.sms
        return Way(model, lambda x, y: model(input_ids=x, labels=y).loss.backward(), sms, ours=True, pipe=pipe)

    def case(self, ways: Mapping[str, Callable[[], Way | None]]) -> Case:
        """The ways to train it."""
        ids, config = self.ids, self.config
        tokens = ids.shape[1]
        short = ids[:, : min(SHORT, tokens // 2)].contiguous()
        with torch.device("meta"):
            weights = sum(parameter.numel() for parameter in self.built().parameters())
        flops = training_flops(weights, config.num_hidden_layers, config.hidden_size, tokens) * ids.numel()
        return Case((ids, ids), (short, short), ids.numel(), flops, ways)

    def built(self) -> Any:
        """The model, with random values."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_config(self.config, dtype=self.card.dtype, attn_implementation="sdpa")

    def _model(self) -> Any:
        """The same values each time."""
        torch.manual_seed(0)
        with self.card.device:
            return self.built().train()


def _case(card: Card, *, captured: bool) -> Case | None:
    model = Llama.of(card, ROWS)
    if model is None:
        return None
    on = parts.split(2) if card.is_gpu else []
    options = {"graphs": True if card.is_gpu else "auto"} if captured else {}  # the CPU has no graphs
    suffix = f", {GRAPHS}" if captured else ""
    made: dict[str, Callable[[], Way | None]] = {
        "plain": lambda: model.alone(None),
        f"one stage{suffix}": lambda: model.attached(1, **options),
    }
    if captured and card.is_gpu:
        stream = torch.cuda.Stream(card.device)
        made["plain as a graph"] = lambda: as_graph(model.alone(None), card, (model.ids, model.ids), stream)
    if on:
        made |= {
            "plain on a half": lambda: model.alone(on[0]),
            f"two halves{suffix}": lambda: model.attached(2, on, **options),
        }
    else:
        made[f"two stages{suffix}"] = lambda: model.attached(2, **options)
    return model.case(made)


class _Ids(nn.Module):
    """The loss of a micro-batch of tokens, which are the labels, too."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss
