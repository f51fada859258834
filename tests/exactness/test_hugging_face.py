"""Hugging Face models: their outputs cross boundaries and leave the pipe as they are, their blocks train exactly."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework import PipeSequential
from pipework.testing import reference_backward
from tests.conftest import WAYS
from tests.ranks import held

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything here has random weights
transformers = pytest.importorskip("transformers")
outputs = pytest.importorskip("transformers.modeling_outputs")
masking = pytest.importorskip("transformers.masking_utils")

outside = WAYS["outside"].pipe
CHECKPOINT_MODES = ("never", "except_last", "always")
WIDTH, TOKENS, WORDS = 16, 6, 11


@dataclass
class Scored(transformers.utils.ModelOutput):
    """A user's own kind of output, with a loss for each micro-batch."""

    loss: Tensor | None = None
    scores: Tensor | None = None
    nested: Any = None


class Encode(nn.Module):
    """Gives hidden states of which the first has no gradient, and leaves two fields out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.linear(x))
        return outputs.BaseModelOutputWithPooling(last_hidden_state=y, pooler_output=None, hidden_states=(x * 2, y * 2))


class Again(nn.Module):
    """Takes such an output and gives one with other fields left out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, encoded: Any) -> Any:
        assert type(encoded) is outputs.BaseModelOutputWithPooling
        assert encoded.pooler_output is None
        assert encoded.attentions is None
        assert list(encoded) == ["last_hidden_state", "hidden_states"]
        first, second = encoded.hidden_states
        return Scored(scores=self.linear(encoded[0]) * first + second, nested=encoded)


class Score(nn.Module):
    def forward(self, scored: Any) -> Any:
        assert type(scored) is Scored
        assert "loss" not in scored
        return Scored(loss=scored.scores.square().mean(), scores=scored["scores"], nested=scored.nested)


def in_plain(model: nn.Sequential, x: Tensor) -> tuple[Tensor, ...]:
    """What the output has in a model without a pipeline, micro-batch by micro-batch, and joined."""
    parts = [model(part) for part in x.tensor_split(3)]
    joined = torch.cat([part.scores for part in parts])
    loss = sum(part.loss * len(part.scores) for part in parts) / len(x)
    return loss, joined, torch.cat([part.nested.hidden_states[1] for part in parts])


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("balance", [[3], [1, 2], [1, 1, 1]], ids=str)
def test_model_outputs_cross_boundaries_and_leave_the_pipe(balance: list[int], checkpoint: str) -> None:
    plain = nn.Sequential(Encode(), Again(), Score()).double()
    pipe = outside(plain, 3, checkpoint, balance=balance)
    x = torch.randn(7, WIDTH, dtype=torch.float64)
    loss, scores, hidden = in_plain(plain, x)
    output = pipe(x)
    assert type(output) is Scored
    assert list(output) == ["loss", "scores", "nested"]
    assert type(output.nested) is outputs.BaseModelOutputWithPooling
    assert output.nested.pooler_output is None
    assert isinstance(output.nested.hidden_states, tuple)
    assert not output.nested.hidden_states[0].requires_grad
    assert torch.equal(output.scores, scores)
    assert output["scores"] is output.scores
    assert torch.equal(output.nested.hidden_states[1], hidden)
    torch.testing.assert_close(output[0], loss, rtol=1e-12, atol=0)
    for tensors in ((loss, scores, hidden), (output.loss, output.scores, output.nested.hidden_states[1])):
        (tensors[0] + tensors[1].sin().sum() + tensors[2].exp().mean()).backward()
    for actual, expected in zip(pipe.parameters(), held(plain, pipe).parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-12, atol=1e-14)


# GPT-2 and BERT, cut between their blocks


class Embed(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.words, self.positions, self.drop = model.wte, model.wpe, model.drop

    def forward(self, words: Tensor) -> Tensor:
        return self.drop(self.words(words) + self.positions(torch.arange(words.shape[1])))


class Block(nn.Module):
    """The model makes the mask for all of its blocks; here each makes its own."""

    def __init__(self, block: nn.Module, config: Any) -> None:
        super().__init__()
        self.block, self.config = block, config

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x, attention_mask=masking.create_causal_mask(self.config, x, None, None))


def gpt2(**options: Any) -> Any:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=TOKENS, n_embd=WIDTH, n_layer=3, n_head=2, attn_implementation="eager", **options
    )
    return transformers.GPT2LMHeadModel(config)


def gpt2_layers(model: Any) -> nn.Sequential:
    body = model.transformer
    return nn.Sequential(Embed(body), *(Block(block, model.config) for block in body.h), body.ln_f, model.lm_head)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("balance", [[6], [2, 4], [1, 2, 2, 1]], ids=str)
def test_gpt2(balance: list[int], checkpoint: str, assert_trained_alike: Callable[..., None]) -> None:
    model = gpt2(tie_word_embeddings=False)
    plain = gpt2_layers(model)
    batches = [(torch.randint(WORDS, (rows, TOKENS)),) for rows in (6, 7, 2)]
    model.eval()
    assert torch.equal(plain(batches[0][0]), model(batches[0][0]).logits)
    model.train()
    pipe = outside(plain, 3, checkpoint, balance=balance)
    assert_trained_alike(plain, pipe, batches, evaluate=True)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_gpt2_whose_head_is_its_embedding(checkpoint: str) -> None:
    plain = gpt2_layers(gpt2()).double()
    assert plain[0].words.weight is plain[5].weight
    pipe = outside(plain, 3, checkpoint, balance=[2, 4])
    words = torch.randint(WORDS, (7, TOKENS))
    plain.eval()
    pipe.eval()
    reference = reference_backward(plain, words, torch.sum, 3, key=0)
    output = pipe(words)
    output.sum().backward()
    assert torch.equal(output, reference.output)
    for actual, expected in zip(pipe.parameters(), held(plain, pipe).parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-12, atol=1e-14)


class Masked(nn.Module):
    """A layer of BERT between others that hand the mask on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x, attention_mask=mask), mask


class Begin(nn.Module):
    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(self, words: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        return self.embeddings(words), (1 - present.float())[:, None, None, :] * -1e9


class End(nn.Module):
    def __init__(self, pooler: nn.Module) -> None:
        super().__init__()
        self.pooler = pooler

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.pooler(x)


@pytest.mark.filterwarnings("ignore:input 1 has the shape:pipework.PipeWarning")  # as many rows as tokens
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("balance", [[4], [1, 3], [1, 1, 1, 1]], ids=str)
def test_bert_with_a_mask(balance: list[int], checkpoint: str, assert_trained_alike: Callable[..., None]) -> None:
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=TOKENS,
        attn_implementation="eager",
    )
    model = transformers.BertModel(config)
    plain = PipeSequential(
        Begin(model.embeddings), *(Masked(layer) for layer in model.encoder.layer), End(model.pooler)
    )
    pipe = outside(plain, 3, checkpoint, balance=balance)
    batches = [(torch.randint(WORDS, (rows, TOKENS)), torch.rand(rows, TOKENS) > 0.3) for rows in (5, 7, 2)]
    model.eval()
    words, present = batches[0]
    torch.testing.assert_close(plain(words, present), model(words, attention_mask=present.long()).pooler_output)
    model.train()
    assert_trained_alike(plain, pipe, batches, evaluate=True)
