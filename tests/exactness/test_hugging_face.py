"""Hugging Face models: their outputs cross boundaries and leave the pipe as they are, their blocks train exactly."""

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import WAYS
from tests.ranks import held

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything here has random weights
transformers = pytest.importorskip("transformers")
outputs = pytest.importorskip("transformers.modeling_outputs")

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
