"""One part of a model: what it takes, what it sends on, and what it refuses."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework.attached import to_sequential
from pipework.model.parts.leaves import Absent
from pipework.values import nested
from tests.integrations.tiny import llama
from tests.model.parts.models import WIDTH, Block


class Net(nn.Module):
    """The first block reads x, the second one reads the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor, words: Tensor, mask: Tensor, extra: Tensor | None = None) -> Tensor:
        x = self.blocks[0](x)
        x = self.blocks[1](x, (words > 0)[:, None] * mask)
        x = self.blocks[2](x)
        return self.blocks[3](x if extra is None else x + extra)


INPUTS = {"x": torch.randn(2, WIDTH), "words": torch.tensor([0, 1]), "mask": torch.rand(2, WIDTH)}


def messages(layers: nn.Sequential, *arguments: Any, **keywords: Any) -> list[Any]:
    values = [layers[0](*arguments, **keywords)]
    for part in list(layers)[1:]:
        values.append(part(values[-1]))
    return values


def test_a_message_holds_what_later_parts_read() -> None:
    model = Net()
    first, second, third, result = messages(to_sequential(model, INPUTS), **INPUTS)
    assert torch.equal(result, model(**INPUTS))
    gone = Absent.of(INPUTS["x"])
    assert first.inputs == ((), {"x": gone, "words": INPUTS["words"], "mask": INPUTS["mask"]})
    assert list(first.values) == ["blocks.0#0"]
    assert second.inputs == ((), {"x": gone, "words": INPUTS["words"], "mask": gone})
    assert (list(second.values), second.values["blocks.0#0"]) == (["blocks.0#0", "blocks.1#0"], gone)
    assert third.inputs == second.inputs
    assert [isinstance(value, Absent) for value in third.values.values()] == [True, True, False]
    assert not third.beside


def test_an_input_that_the_sample_did_not_have_goes_to_all_parts() -> None:
    extra, model = torch.randn(2, WIDTH), Net()
    found = messages(to_sequential(model, INPUTS), extra=extra, **INPUTS)
    assert found[2].inputs[1]["extra"] is extra
    assert torch.equal(found[-1], model(extra=extra, **INPUTS))


def test_positional_arguments() -> None:
    model = Net()
    layers = to_sequential(model, tuple(INPUTS.values()))
    assert torch.equal(messages(layers, *INPUTS.values())[-1], model(**INPUTS))
    assert torch.equal(messages(layers, INPUTS["x"], mask=INPUTS["mask"], words=INPUTS["words"])[-1], model(**INPUTS))


class Stopping(nn.Module):
    """Calls fewer units for negative inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if (x.detach() != x.detach()).all():
                break
        return x


def test_a_forward_that_ends_too_early_is_refused() -> None:
    first, second, third = to_sequential(Stopping(), torch.ones(2, WIDTH))
    with pytest.raises(RuntimeError, match=r"forward of Stopping ended before its last part: .*also called blocks.1#0"):
        first(torch.full((2, WIDTH), torch.nan))
    assert third(second(first(torch.ones(2, WIDTH)))).shape == (2, WIDTH)


def test_a_message_of_a_decoder() -> None:
    """No mask of all pairs of tokens, which each layer computes from the ids; positions as long as they are read."""
    ids = torch.randint(3, 37, (2, 16))
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask}
    *sent, _ = messages(to_sequential(llama(), batch), **batch)
    shapes = [sorted(tuple(each.shape) for each in nested.flatten(message)[0]) for message in sent]
    given, hidden = [(2, 16)] * 3, (2, 16, llama().config.hidden_size)
    positions = [(1, 16, llama().model.layers[0].self_attn.head_dim)] * 2
    assert shapes == [sorted([*given, *positions, hidden])] * 2 + [sorted([*given, hidden])] * 2
