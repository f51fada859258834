import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipework import MicroBatches, Pipe, attach
from pipework.model.own_split import in_micro_batches

CC = ["cpu", "cpu"]


class Packed(nn.Module):
    """Means over sequences that lie one behind the other; `offsets` say where they begin."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        bounds = [*offsets.tolist(), len(ids)]
        return torch.stack([self.embed(ids[a:b]).mean(0) for a, b in itertools.pairwise(bounds)])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Packed(), nn.Linear(4, 3)

    def forward(self, ids: Tensor, offsets: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.second(self.first(ids, offsets))
        return logits if labels is None else {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def by_sequences(arguments: tuple[Any, ...], keywords: dict[str, Any], target: Any, chunks: int) -> list[Any]:
    """Equally many sequences for each micro-batch."""
    names = dict(zip(("ids", "offsets"), arguments, strict=False)) | keywords
    ids, offsets = names["ids"], names["offsets"]
    bounds = [*offsets.tolist(), len(ids)]
    parts = []
    for rows in torch.arange(len(offsets)).tensor_split(chunks):
        start, stop = bounds[rows[0]], bounds[rows[-1] + 1]
        own = {"ids": ids[start:stop], "offsets": offsets[rows] - start}
        parts.append(((), own, None if target is None else target[rows]))
    return parts


def batch() -> dict[str, Tensor]:
    return {"ids": torch.arange(20) % 11, "offsets": torch.tensor([0, 8, 10, 15]), "labels": torch.tensor([0, 1, 2, 1])}


def test_packed_sequences_in_a_pipe() -> None:
    given = batch()
    model = nn.Sequential(Packed(), nn.Linear(4, 3))
    pipe = Pipe(
        model, chunks=2, balance=[1, 1], devices=CC, schedule="1f1b", loss_fn=functional.cross_entropy,
        split=by_sequences,
    )  # fmt: skip
    loss = pipe(given["ids"], given["offsets"], target=given["labels"])
    loss.backward()
    got = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    halves = by_sequences((), {"ids": given["ids"], "offsets": given["offsets"]}, given["labels"], 2)
    whole = sum(functional.cross_entropy(model[1](model[0](**names)), labels) * 0.5 for _, names, labels in halves)
    whole.backward()
    assert torch.equal(loss.detach(), whole.detach())
    torch.testing.assert_close(got, [parameter.grad for parameter in model.parameters()], rtol=0, atol=1e-7)
    with torch.no_grad():
        outputs = pipe(given["ids"], given["offsets"])
    assert [tuple(output.shape) for output in outputs] == [(2, 3), (2, 3)]
    # What is cut already is left alone.
    with torch.no_grad():
        (output,) = pipe(MicroBatches([given["ids"]]), MicroBatches([given["offsets"]]))
    torch.testing.assert_close(output, torch.cat([*outputs]))


def test_packed_sequences_in_an_attached_model() -> None:
    model, given = Model(), batch()
    with pytest.raises(ValueError, match=r"does not say how other batches are to be cut: 'offsets' has .*split="):
        attach(model, given, chunks=2, devices=CC)
    options = {"balance": [1, 1], "blocks": [Packed, nn.Linear], "devices": CC}
    attach(model, given, chunks=2, split=by_sequences, loss_weight=len, check=False, **options)
    loss = model(given["ids"], offsets=given["offsets"], labels=given["labels"])["loss"]
    loss.backward()
    expected = type(model).forward(model, **given)["loss"]
    torch.testing.assert_close(loss.detach(), expected.detach())
    gradient = torch.autograd.grad(expected, model.second.weight)[0]
    torch.testing.assert_close(model.second.weight.grad, gradient)


@pytest.mark.parametrize(
    ("returned", "error", "words"),
    [
        ([], ValueError, "returned no micro-batch"),
        ([torch.ones(2)], TypeError, "returned Tensor for micro-batch 0: wanted a list"),
        (
            [((1,), {}, None), ((1, 2), {}, None)],
            ValueError,
            "returned 2 positional arguments and the names .* for micro-batch 1, and 1 and",
        ),
        ([((1,), {"a": 1}, None), ((1,), {}, None)], ValueError, r"names \[\] for micro-batch 1, and 1 and \['a'\]"),
        ([(torch.ones(2), {}, None)], TypeError, r"returned \(Tensor, dict, NoneType\) for micro-batch 0"),
        ([((1,), {}, 3)], ValueError, "returned a target for micro-batch 0, and the call has none"),
        ({"x": 1}, TypeError, "returned a dict: wanted a list with a tuple"),
        (None, TypeError, "returned a NoneType: wanted a list"),
        ((((1,), {}, None)), TypeError, "returned a tuple: wanted a list"),
    ],
)
def test_what_else_is_returned_is_refused(returned: list[Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        in_micro_batches(lambda *call: returned, (torch.ones(4),), {}, None, 2)


def test_an_error_in_the_function_says_where_it_was() -> None:
    with pytest.raises(KeyError) as caught:
        in_micro_batches(lambda inputs, keywords, target, chunks: keywords["images"], (torch.ones(4),), {}, None, 2)
    assert caught.value.__notes__ == ["pipework: in split=, called with chunks=2"]


def test_an_attached_model_says_what_split_returned() -> None:
    def attached(returned: list[Any]) -> None:
        attach(Model(), batch(), chunks=2, devices=CC, split=lambda *call: returned, loss_weight=len)

    with pytest.raises(TypeError, match="split= returned Tensor for micro-batch 0: wanted a list"):
        attached([torch.ones(2)])
    with pytest.raises(ValueError, match=r"has one micro-batch, so nothing shows .* of two micro-batches or more"):
        attached([((), {key: value for key, value in batch().items() if key != "labels"}, batch()["labels"])])


def test_a_loss_of_which_split_loses_rows_is_refused() -> None:
    def halves(arguments: tuple[Any, ...], keywords: dict[str, Any], target: Any, chunks: int) -> list[Any]:
        return by_sequences(arguments, keywords, target, chunks + 1)[:chunks]

    with pytest.raises(ValueError, match="the loss of Model for 2 micro-batches of the sample is"):
        attach(Model(), batch(), chunks=2, devices=CC, split=halves, loss_weight=len)
