import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipework import Chunk, MicroBatches, NoChunk, Pipe, attach
from pipework.model.marks import NO_ROWS, in_micro_batches
from pipework.model.mini_batch import MiniBatch
from pipework.values.nested import unflatten

CPU = torch.device("cpu")
A, B, C = torch.zeros(3, 4), torch.ones(2, 4), torch.ones(2, 5, 4)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def pipe(**options: Any) -> Pipe:
    return Pipe(model(), chunks=2, balance=[2, 1], devices=["cpu", "cpu"], **options)


@pytest.mark.parametrize("values", [A, {"x": A}, "text", NoChunk(A), 5, None])
def test_what_is_no_list_is_refused(values: Any) -> None:
    with pytest.raises(TypeError, match=rf"MicroBatches got {type(values).__name__}: wanted a list.*MicroBatches\("):
        MicroBatches(values)


def test_values_reach_their_micro_batches() -> None:
    mask = torch.ones(2)
    batch = MiniBatch.of_caller(
        (MicroBatches([{"x": A}, [B, (C, "text")]]), 5, NoChunk(mask)), {"flag": True, "more": MicroBatches([None, C])}
    )
    values = [unflatten(*message) for message in batch.micro_batches]
    (first, five, whole), keywords = values[0]
    assert torch.equal(first["x"], A)
    assert (five, keywords) == (5, {"flag": True, "more": None})
    assert torch.equal(whole, mask)
    (second, _, _), keywords = values[1]
    assert second[1][1] == "text"
    assert torch.equal(second[1][0], C)
    assert torch.equal(keywords["more"], C)


def test_rows_are_those_that_all_tensors_have() -> None:
    batch = MiniBatch.of_caller(
        (MicroBatches([A, B, [B, C], [A, C], torch.tensor(1.0)]), NoChunk(torch.zeros(7))), {"flag": torch.float64}
    )
    assert batch.rows == [3, 2, 2, NO_ROWS, NO_ROWS]


@pytest.mark.parametrize(
    ("targets", "rows"),
    [
        (MicroBatches([torch.zeros(3), torch.zeros(2)]), [3, 2]),
        (MicroBatches([A, B]), [3, 2]),
        (MicroBatches([[A, NoChunk(C)], [B, NoChunk(C)]]), [3, 2]),
        (MicroBatches([A, C]), [-1, -1]),  # two numbers in a row, or ten
        (MicroBatches([A, [B, B.clone()]]), [-1, -1]),
        (MicroBatches([A, torch.zeros(3, 4)]), [3, -1]),
        (MicroBatches([A, torch.tensor(1.0)]), [-1, -1]),
        (MicroBatches(["text", 5]), [-1, -1]),
        ("text", [-1, -1]),
        (NoChunk(A), [-1, -1]),
    ],
)
def test_rows_weigh_a_loss_only_if_nothing_else_can(targets: Any, rows: list[int]) -> None:
    batch = MiniBatch.of_caller((MicroBatches([A, B]),), {})
    batch.cut_target(targets, CPU)
    messages, weighing = batch.targets, batch.weighing
    assert len(messages) == 2
    assert weighing == rows


UNFIT: list[tuple[tuple[Any, ...], Any, type[Exception], str]] = [  # inputs, target, error, its words
    ((MicroBatches([A, B]), MicroBatches([A])), None, ValueError, "input 0 has 2 micro-batches and input 1 h"),
    ((MicroBatches([A, B]), A), None, ValueError, "input 1 has tensors outside of MicroBatches.*2 parts.*NoChunk"),
    (([MicroBatches([A, B])],), None, TypeError, "MicroBatches is inside of another value: wanted it as a"),
    ((MicroBatches([A, 5]),), None, TypeError, "micro-batch 1 does not have any tensors"),
    ((MicroBatches([A, B]),), MicroBatches([A]), ValueError, "inputs have 2 micro-batches and the target has 1"),
    ((MicroBatches([A, B]),), A, ValueError, "the target has tensors outside of MicroBatches"),
    ((A,), MicroBatches([A]), TypeError, "the target is MicroBatches and the inputs are not"),
    (
        (MicroBatches([A, B]),), MicroBatches([A, B.clone().requires_grad_()]),
        ValueError, "requires a gradient, which it would not get",
    ),
    (
        (MicroBatches([A, C]),), MicroBatches([A, C]),
        ValueError, r"rows do not say.*\(3, 4\).*loss_weight=torch.numel.*loss_reduction='sum'",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("inputs", "target", "kind", "words"), UNFIT)
def test_what_does_not_fit_is_refused(inputs: Any, target: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        pipe(loss_fn=functional.mse_loss)(*inputs, target=target)


def test_a_sum_needs_no_weights() -> None:
    p = pipe(loss_fn=lambda output, target: (output - target).square().sum(), loss_reduction="sum", schedule="1f1b")
    loss = p(MicroBatches([A, C]), target=MicroBatches([A, C]))
    torch.testing.assert_close(loss, sum((p[2](p[1](p[0](x))) - x).square().sum() for x in (A, C)))


def test_outputs_of_different_nesting_stay_as_they_are() -> None:
    class Report(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"x": x, "rows": len(x)} if x.dim() == 2 else (x, x.mean())

    p = Pipe(nn.Sequential(nn.Linear(4, 4), Report()), chunks=2, balance=[1, 1], devices=["cpu", "cpu"])
    first, (second, mean) = p(MicroBatches([A, C]))
    assert first["rows"] == 3
    (first["x"].sum() + mean).backward()  # the second tensor has no gradient
    expected = torch.autograd.grad(p[0](A).sum() + p[0](C).mean(), list(p[0].parameters()))
    for parameter, gradient in zip(p[0].parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert second.requires_grad


def test_in_place_layers_do_not_change_what_is_given() -> None:
    p = Pipe(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), chunks=2, balance=[1, 1], devices=["cpu", "cpu"])
    leaf = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="in-place"):
        p(MicroBatches([A, leaf]))
    outputs = p(MicroBatches([A, leaf * 1]))
    sum(output.sum() for output in outputs).backward()
    assert leaf.grad is not None


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
        ([], TypeError, "returned a list without a micro-batch: wanted a list"),
        ({"x": 1}, TypeError, "returned a dict without a micro-batch"),
        ([torch.ones(2)], TypeError, "returned Tensor for micro-batch 0: wanted a list"),
        ([(torch.ones(2), {}, None)], TypeError, r"returned \['Tensor', 'dict', 'NoneType'\] for micro-batch 0"),
        ([((1,), {}, 3)], TypeError, "'int'.*a target is None, as the call has none"),
        ([((1,), {"a": 1}, None), ((1,), {}, None)], ValueError, r"names \[\] for micro-batch 1, and 1 and \['a'\]"),
    ],
)
def test_what_else_is_returned_is_refused(returned: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        in_micro_batches(lambda *call: returned, (torch.ones(4),), {}, None, 2)


def test_an_error_in_the_function_says_where_it_was() -> None:
    with pytest.raises(KeyError) as caught:
        in_micro_batches(lambda inputs, keywords, target, chunks: keywords["images"], (torch.ones(4),), {}, None, 2)
    assert caught.value.__notes__ == ["pipework: in split=, called with chunks=2"]


def test_a_loss_of_which_split_loses_rows_is_refused() -> None:
    def halves(arguments: tuple[Any, ...], keywords: dict[str, Any], target: Any, chunks: int) -> list[Any]:
        return by_sequences(arguments, keywords, target, chunks + 1)[:chunks]

    def attached(split: Any) -> None:
        attach(Model(), batch(), chunks=2, devices=CC, split=split, loss_weight=len)

    with pytest.raises(ValueError, match="the loss of Model for 2 micro-batches of the sample is"):
        attached(halves)
    whole = batch()
    one = [((), {"ids": whole["ids"], "offsets": whole["offsets"]}, whole["labels"])]
    with pytest.raises(ValueError, match=r"nothing shows .* has one micro-batch: .* of two micro-batches or more"):
        attached(lambda *call: one)


@pytest.mark.parametrize("dim", [True, 1.0, "batch", None])
def test_a_dimension_is_a_number(dim: object) -> None:
    with pytest.raises(TypeError, match=r"Chunk got dim=.*: wanted the number of the dimension"):
        Chunk(torch.ones(2), dim)  # type: ignore[arg-type]
