from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipework import MicroBatches, NoChunk, Pipe, pop, skippable, stash
from pipework.model.given import NO_ROWS, given
from pipework.schedule import one_forward_one_backward
from pipework.values.nested import unflatten

CPU = torch.device("cpu")
A, B, C = torch.zeros(3, 4), torch.ones(2, 4), torch.ones(2, 5, 4)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def pipe(**options: Any) -> Pipe:
    return Pipe(model(), chunks=2, balance=[2, 1], devices=["cpu", "cpu"], **options)


def test_micro_batches_are_a_list() -> None:
    values = MicroBatches(x for x in (A, B))
    assert len(values) == 2
    assert values[1] is B
    assert values[-1] is B
    assert values[:1] == (A,)
    assert [*values] == [A, B]
    assert repr(MicroBatches([1, "a"])) == "MicroBatches([1, 'a'])"


@pytest.mark.parametrize("values", [A, {"x": A}, "text", NoChunk(A), 5, None])
def test_what_is_no_list_is_refused(values: Any) -> None:
    with pytest.raises(TypeError, match=rf"MicroBatches got {type(values).__name__}: wanted a list.*MicroBatches\("):
        MicroBatches(values)


def test_no_micro_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="MicroBatches is empty: wanted the value of at least one"):
        MicroBatches([])


def test_values_reach_their_micro_batches() -> None:
    mask = torch.ones(2)
    batch = given(
        (MicroBatches([{"x": A}, [B, (C, "text")]]), 5, NoChunk(mask)),
        {"flag": True, "more": MicroBatches([None, C])},
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
    batch = given(
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
    messages, weighing = given((MicroBatches([A, B]),), {}).targets(targets, CPU)
    assert len(messages) == 2
    assert weighing == rows


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda p: p(MicroBatches([A, B]), MicroBatches([A])), ValueError, "input 0 has 2 micro-batches and input 1 h"),
        (lambda p: p(MicroBatches([A]), x=MicroBatches([A, B])), ValueError, "input 'x' has 2: wanted equally many"),
        (
            lambda p: p(MicroBatches([A, B]), A),
            ValueError,
            "input 1 has tensors outside of MicroBatches.*2 parts.*NoCh",
        ),
        (lambda p: p(MicroBatches([A, B]), mask=[A]), ValueError, "input 'mask' has tensors outside of MicroBatches"),
        (lambda p: p([MicroBatches([A, B])]), TypeError, "MicroBatches is inside of another value: wanted it as a"),
        (
            lambda p: p(MicroBatches([A, {"x": MicroBatches([A])}])),
            TypeError,
            "MicroBatches is inside of another value",
        ),
        (lambda p: p(A, {"x": MicroBatches([A])}), TypeError, "MicroBatches is inside of another value"),
        (lambda p: p(MicroBatches([A, 5])), TypeError, "micro-batch 1 does not have any tensors"),
        (lambda p: p(MicroBatches([A, 5]), NoChunk(B)), TypeError, "micro-batch 1 does not have any tensors"),
        (
            lambda p: p(MicroBatches([A, B]), target=MicroBatches([A])),
            ValueError,
            "the inputs have 2 micro-batches and the target has 1",
        ),
        (lambda p: p(MicroBatches([A, B]), target=A), ValueError, "the target has tensors outside of MicroBatches"),
        (lambda p: p(A, target=MicroBatches([A])), TypeError, "the target is MicroBatches and the inputs are not"),
        (lambda p: p(A, target=[MicroBatches([A])]), TypeError, "MicroBatches is inside of another value"),
        (
            lambda p: p(MicroBatches([A, B]), target=MicroBatches([A, B.clone().requires_grad_()])),
            ValueError,
            "requires a gradient, which it would not get",
        ),
        (
            lambda p: p(MicroBatches([A, C]), target=MicroBatches([A, C])),
            ValueError,
            r"rows do not say.*\(3, 4\)\).*loss_weight=torch.numel.*loss_reduction='sum'",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[Pipe], Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        call(pipe(loss_fn=functional.mse_loss))


def test_a_sum_needs_no_weights() -> None:
    p = pipe(loss_fn=lambda output, target: (output - target).square().sum(), loss_reduction="sum", schedule="1f1b")
    loss = p(MicroBatches([A, C]), target=MicroBatches([A, C]))
    torch.testing.assert_close(loss, sum((p[2](p[1](p[0](x))) - x).square().sum() for x in (A, C)))


def test_a_schedule_of_ones_own_is_for_so_many_micro_batches() -> None:
    p = pipe(schedule=one_forward_one_backward(2, 2), loss_fn=functional.mse_loss)
    p(MicroBatches([A]), target=MicroBatches([A])).backward()
    with pytest.raises(ValueError, match="the mini-batch has 3 micro-batches, and the schedule '1f1b' is made for 2"):
        p(MicroBatches([A, A, B]), target=MicroBatches([A, A, B]))


def test_outputs_without_a_graph_where_none_is_wanted() -> None:
    p = pipe()
    with torch.no_grad():
        outputs = p(MicroBatches([A, C]))
    assert isinstance(outputs, MicroBatches)
    assert [tuple(output.shape) for output in outputs] == [(3, 4), (2, 5, 4)]
    assert not any(output.requires_grad for output in outputs)


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


def test_one_pipe_after_the_other() -> None:
    first, second = pipe(), pipe()
    x = C.clone().requires_grad_()
    outputs = second(first(MicroBatches([A, x])))
    sum(output.sum() for output in outputs).backward()
    assert x.grad is not None
    assert first[0].weight.grad is not None


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x)
        return x * 2


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return x + skip


def test_skip_connections() -> None:
    module = nn.Sequential(Stash(), nn.Linear(4, 4), Pop())
    p = Pipe(module, chunks=2, balance=[1, 1, 1], devices=["cpu"] * 3)
    for x, output in zip((A, C, B), p(MicroBatches([A, C, B])), strict=True):
        assert torch.equal(output, module[1](x * 2) + x)


def test_steps_are_recorded_and_predicted() -> None:
    p = pipe(schedule="1f1b", loss_fn=functional.mse_loss, loss_weight=torch.numel)
    batch = MicroBatches([A, C, B])
    with p.record() as recording:
        p(batch, target=batch).backward()
    assert {interval.action.micro_batch for interval in recording.timeline().intervals} == {0, 1, 2}
    prediction = p.predict(batch, target=batch, timeout=0)
    assert prediction.simulation.schedule.micro_batches == 3


def test_in_place_layers_do_not_change_what_is_given() -> None:
    p = Pipe(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), chunks=2, balance=[1, 1], devices=["cpu", "cpu"])
    leaf = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="in-place"):
        p(MicroBatches([A, leaf]))
    outputs = p(MicroBatches([A, leaf * 1]))
    sum(output.sum() for output in outputs).backward()
    assert leaf.grad is not None
