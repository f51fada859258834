"""A Llama of 1.2 billion parameters, as transformers has it, with a pipe attached."""

from __future__ import annotations

from collections.abc import Callable
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


def _case(card: Card, *, captured: bool) -> Case | None:
    try:
        from transformers import LlamaConfig
    except ImportError:
        print("llama is left out, because transformers is not installed: pip install transformers\n")
        return None

    if card.is_gpu:
        sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
        tokens, vocabulary, groups = 2048, 128_256, 8
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        tokens, vocabulary, groups = 8, 64, 1
    config = LlamaConfig(
        vocab_size=vocabulary, num_key_value_heads=groups, tie_word_embeddings=True, use_cache=False,
        max_position_embeddings=tokens, **sizes,
    )  # fmt: skip
    on = parts.split(2) if card.is_gpu else []
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary, (ROWS, tokens), generator=draw).to(card.device)
    short = ids[:, : min(SHORT, tokens // 2)].contiguous()

    def alone(part: parts.Part | None) -> Way:
        model = _model(config, card)
        sms, stream = (card.sms, None) if part is None else (part.sms, part.stream)
        return plain(_Ids(model), lambda output, labels: output, ROWS, sms, stream)

    def attached(stages: int, on: list[parts.Part]) -> Way:
        model = _model(config, card)
        sample = {"input_ids": ids[:2], "labels": ids[:2]}
        how = captured and (True if card.is_gpu else "auto")  # the CPU has no graphs
        pipe = pipework.attach(
            model, sample, chunks=ROWS, checkpoint="never", devices=[card.device] * stages, graphs=how
        )
        if on:
            parts.compute_on(pipe, on)
        sms = sum(part.sms for part in on) or card.sms
        return Way(model, lambda x, y: model(input_ids=x, labels=y).loss.backward(), sms, ours=True, pipe=pipe)

    suffix = f", {GRAPHS}" if captured else ""
    made: dict[str, Callable[[], Way | None]] = {
        "plain": lambda: alone(None),
        f"one stage{suffix}": lambda: attached(1, []),
    }
    if captured and card.is_gpu:
        made["plain as a graph"] = lambda: as_graph(alone(None), card, (ids, ids), torch.cuda.Stream(card.device))
    if on:
        made |= {"plain on a half": lambda: alone(on[0]), f"two halves{suffix}": lambda: attached(2, on)}
    else:
        made[f"two stages{suffix}"] = lambda: attached(2, [])
    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in _built(config, card.dtype).parameters())
    flops = training_flops(weights, config.num_hidden_layers, config.hidden_size, tokens) * ids.numel()
    return Case((ids, ids), (short, short), ids.numel(), flops, made)


class _Ids(nn.Module):
    """The loss of a micro-batch of tokens, which are the labels, too."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss


def _built(config: Any, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


def _model(config: Any, card: Card) -> Any:
    """The same values each time."""
    torch.manual_seed(0)
    with card.device:
        return _built(config, card.dtype).train()
