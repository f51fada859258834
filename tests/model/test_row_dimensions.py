import copy
import warnings
from collections import OrderedDict, UserDict, deque, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask

from pipework import Chunk, MicroBatches, NoChunk, Pipe, PipeWarning, attach
from pipework.model.marks import flattened
from pipework.model.row_dimensions import Layout, has_entries, may_be_offsets, values_in

CC = ["cpu", "cpu"]


class First(nn.Module):
    """Keeps what it was given, for each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, ids: Tensor, position_ids: Any = None, **more: Any) -> Tensor:
        self.seen.append(more or position_ids)
        return ids.float()


def made(chunks: int = 2, **options: Any) -> tuple[Pipe, First]:
    first = First()
    return Pipe(nn.Sequential(first, nn.Tanh()), chunks, balance=[1, 1], devices=CC, **options), first


def ids(rows: int, tokens: int) -> Tensor:
    return torch.arange(rows * tokens).view(rows, tokens)


AMBIGUOUS: dict[str, tuple[tuple[int, int], Any, int]] = {  # the shape of the ids, the value, where it is cut
    "rows in two dimensions": ((3, 6), torch.zeros(3, 3, 6), 0),
    "not the first": ((4, 6), torch.zeros(3, 4, 6), 1),
    "tokens as many as rows": ((6, 6), torch.zeros(6, 5), 0),
    "a mask": ((6, 5), torch.zeros(6, 6), 0),
    "offsets": ((4, 5), torch.tensor([0, 8, 10, 20]), 0),
    "a list": ((4, 5), [torch.zeros(4, 2)] * 4, 0),
}


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_what_is_ambiguous_is_warned_of_once_by_its_name(case: str) -> None:
    shape, value, dim = AMBIGUOUS[case]
    pipe, _ = made()
    words = rf"^'position_ids' .*along dimension {dim} .*shape does not show that these are its rows.*Chunk.*NoChunk"
    with pytest.warns(PipeWarning, match=rf"{words}.*split=.*MicroBatches") as seen:
        pipe(ids(*shape), value)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    pipe(ids(*shape), value)
    with pytest.warns(PipeWarning, match=r"^'position_ids' "):
        made()[0](ids(*shape), position_ids=value)
    made()[0](ids(*shape), NoChunk(value))
    made(1)[0](ids(*shape), value)  # nothing is cut


def test_a_dimension_that_is_said_is_cut_and_its_gradients_are_joined() -> None:
    class Add(nn.Module):
        def forward(self, x: Tensor, position: Any) -> Tensor:
            return x * position["p"][0].sum(0)[:, None]

    x, p = torch.randn(5, 3), torch.randn(4, 5, requires_grad=True)
    pipe = Pipe(nn.Sequential(Add(), nn.Tanh()), 2, balance=[1, 1], devices=CC)
    output = pipe(x, Chunk({"p": [p]}, dim=-1))
    assert torch.equal(output, (x * p.sum(0)[:, None]).tanh())
    output.square().sum().backward()
    got, p.grad = p.grad, None
    (x * p.sum(0)[:, None]).tanh().square().sum().backward()
    assert torch.equal(got, p.grad)


def test_the_rows_of_the_first_may_be_said_too() -> None:
    first = First()
    turned = Pipe(nn.Sequential(first, nn.Flatten(0)), 3, balance=[1, 1], devices=CC)
    turned(Chunk(ids(6, 4), dim=1), torch.zeros(4, 2))
    assert [len(each) for each in first.seen] == [2, 1, 1]
    with pytest.raises(ValueError, match=r"Chunk got dim=2 for a tensor of shape \(6, 4\)"):
        turned(Chunk(ids(6, 4), dim=2))


def test_what_a_first_mini_batch_has_shown_holds_for_the_next() -> None:
    pipe, first = made()
    with pytest.warns(PipeWarning, match="along dimension 1"):
        pipe(ids(4, 6), torch.zeros(3, 4, 6))
    first.seen.clear()
    pipe(ids(3, 6), torch.zeros(3, 3, 6))  # ambiguous now
    assert [tuple(each.shape) for each in first.seen] == [(3, 2, 6), (3, 1, 6)]
    with pytest.raises(
        ValueError, match=r"'ids' has the shape \(4, 6\) .*dimension 0, and 'position_ids' .*dimension 1"
    ):
        pipe(ids(4, 6), torch.zeros(4, 3, 6))
    pipe[0] = First()  # other arguments
    with pytest.warns(PipeWarning, match="along dimension 0"):
        pipe(ids(3, 6), torch.zeros(3, 3, 6))


def test_a_list_of_as_many_entries_as_in_a_batch_of_other_rows_is_no_list_of_rows() -> None:
    pipe, first = made(loss_fn=lambda output, target: output.mean())
    pipe(ids(8, 5), [2, 3], target=["a", "b"])
    pipe(ids(2, 5), [2, 3], target=["c", "d"])
    assert first.seen == [[2, 3]] * 4
    # Another number of entries is looked at again.
    with pytest.raises(ValueError, match=r"^'position_ids' is a list with 4 entries, as many as the batch has rows"):
        pipe(ids(4, 5), [1, 2, 3, 4])
    for later in (["a"] * 4, [torch.zeros(4)] * 4, numpy.zeros(4)):
        with pytest.raises(ValueError, match=r"^'target' is a .* with 4 entries, as many as the batch has rows"):
            pipe(ids(4, 5), [2, 3], target=later)


def test_a_value_in_a_mark_shows_nothing_of_one_without() -> None:
    pipe, _ = made(loss_fn=lambda output, target: output.mean())
    pipe(ids(4, 5), NoChunk(list("abcd")), target=NoChunk(list("abcd")))
    with pytest.raises(ValueError, match=r"^'position_ids' is a list with 4 entries"):
        pipe(ids(4, 5), list("abcd"))
    with pytest.raises(ValueError, match=r"^'target' is a list with 4 entries"):
        pipe(ids(4, 5), target=list("abcd"))


def test_what_was_none_at_first_is_looked_at_when_it_is_there() -> None:
    pipe, first = made()
    pipe(ids(4, 6), None)
    first.seen.clear()
    pipe(ids(4, 6), torch.arange(4) * 2.0)
    assert [each.tolist() for each in first.seen] == [[0, 2], [4, 6]]
    for later in (numpy.arange(4), list("abcd")):
        pipe, _ = made()
        pipe(ids(4, 6), None)
        with pytest.raises(ValueError, match="with 4 entries, as many as the batch has rows"):
            pipe(ids(4, 6), later)
    pipe, _ = made()
    pipe(ids(4, 6), None)
    with pytest.warns(PipeWarning, match="along dimension 0"):
        pipe(ids(4, 6), torch.zeros(4, 4))


def test_a_mini_batch_that_fails_and_a_prediction_show_nothing() -> None:
    pipe, first = made()
    with pytest.raises(ValueError, match="same number of rows"):
        pipe(ids(4, 6), torch.zeros(5, 5))
    first.forward = lambda *arguments: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError) as caught:
        pipe(ids(5, 6), torch.zeros(5, 5))
    assert any("'position_ids' has the shape (5, 5)" in note for note in caught.value.__notes__)
    del first.forward
    pipe.predict(ids(5, 6), torch.zeros(5, 5), timeout=0)
    with pytest.warns(PipeWarning, match=r"^'position_ids' .*along dimension 0"):
        pipe(ids(5, 6), torch.zeros(5, 5))


def test_a_later_mini_batch_with_tensors_that_have_no_rows_is_refused_like_the_first() -> None:
    pipe, _ = made()
    pipe(ids(4, 6), torch.zeros(4, 3))
    uneven = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    for later, words in (
        (torch.eye(4, 3).to_sparse(), "'position_ids' is not dense"),
        (torch.tensor(1.0), "'position_ids' is 0-dimensional"),
        (uneven, "is a nested tensor"),
    ):
        with pytest.raises(ValueError, match=words):
            pipe(ids(4, 6), later)


def test_names_that_change_with_each_call_are_not_kept_for_ever() -> None:
    layout = Layout()
    for number in range(3000):
        call = (ids(4, 6),), {f"more{number}": torch.zeros(4)}
        *_, learned = layout.of_inputs(*call, flattened(call), 2)
        assert learned is not None
        layout.learn(learned)
    assert len(layout.dims) <= 1001


REFUSED = {
    "strings": ["a"] * 4,
    "numbers": (1, 2, 3, 4),
    "an array": numpy.zeros((4, 2)),
    "a block mask": create_block_mask(lambda b, h, q, k: q >= k, 4, 1, 128, 128, device="cpu"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_an_entry_for_each_row_and_is_not_cut_is_refused(case: str) -> None:
    value = REFUSED[case]
    with pytest.raises(ValueError, match=r"^'position_ids' is a .* with 4 entries, as many .*split=.*NoChunk\(value\)"):
        made()[0](ids(4, 6), value)
    made()[0](ids(8, 6), value)
    pipe, first = made()
    pipe(ids(4, 6), NoChunk(value))
    assert all(each is value or each == value for each in first.seen)
    pipe, first = made()
    pipe(MicroBatches(ids(4, 6).split(2)), MicroBatches([1, 2]))
    assert sorted(first.seen) == [1, 2]


def test_unequal_rows_name_the_arguments_and_the_ways() -> None:
    with pytest.raises(ValueError, match=r"'ids' .*\(7, 4\).*'position_ids\[0\]' has the shape \(5,\).*Chunk"):
        made()[0](ids(7, 4), [torch.zeros(5 + n) for n in range(7)])


def test_targets_are_looked_at_too() -> None:
    pipe, _ = made(loss_fn=lambda output, target: output.mean())
    for target in ([{"boxes": torch.zeros(4, 2)}] * 4, numpy.zeros(4), {"names": ("a", "b", "c", "d")}):
        with pytest.raises(ValueError, match=r"^[\"']target.* is a .*with 4 entries, as many as the batch has rows"):
            pipe(ids(4, 6), target=target)
        pipe(ids(4, 6), target=NoChunk(target))
    both = [torch.zeros(2, 6), torch.ones(2, 6)]
    with pytest.raises(ValueError, match=r"a list with 2 entries.*each of its tensors has the rows, give Chunk"):
        pipe(ids(2, 6), target=both)
    pipe(ids(2, 6), target=Chunk(both))
    pipe(ids(4, 6), target=[torch.zeros(4, 6), torch.ones(4, 6)])
    pipe(ids(2, 6), target=both)  # as many as with four rows


def test_a_target_with_its_rows_elsewhere() -> None:
    targets = []
    pipe, _ = made(loss_fn=lambda output, target: (targets.append(target), output.mean())[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PipeWarning)
        pipe(ids(4, 6), target=Chunk(torch.zeros(3, 4), dim=1))
    assert {tuple(target.shape) for target in targets[:2]} == {(3, 2)}
    with pytest.raises(ValueError, match=r"a target tensor has shape \(3, 4\): wanted as many rows, .*Wrap .*Chunk\("):
        pipe(ids(4, 6), target=torch.zeros(3, 4))


# Samples


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 8), nn.Linear(8, 1)

    def forward(self, ids: Tensor, position_ids: Any = None, extra: Any = None, labels: Tensor | None = None) -> Any:
        x = self.embed(ids)
        if position_ids is not None:
            x = x + position_ids.float().mean(0)[..., None]
        if extra is not None:
            x = x * extra["scale"]
        logits = self.head(x).squeeze(-1)
        return logits if labels is None else {"loss": functional.mse_loss(logits, labels.mT), "logits": logits}


def batch(rows: int, tokens: int) -> dict[str, Any]:
    return {
        "ids": ids(rows, tokens) % 40,
        "position_ids": torch.arange(3 * rows * tokens).view(3, rows, tokens),
        "extra": {"scale": NoChunk(torch.linspace(0.5, 2, tokens)[:, None])},
        "labels": torch.arange(rows * tokens).view(tokens, rows) / 10,
    }


def test_a_sample_says_how_later_batches_are_cut() -> None:
    model = Model()
    attach(model, batch(2, 5), chunks=3, balance=[1, 1], devices=CC, check=False)
    later = batch(6, 6)
    later["extra"]["scale"] = later["extra"]["scale"].value  # the sample has said it
    loss = model(**later)["loss"]
    loss.backward()
    got = model.head.weight.grad
    model.zero_grad()
    plain = copy.deepcopy(model)
    del plain.forward
    parts = [
        {
            "ids": later["ids"][rows],
            "position_ids": later["position_ids"][:, rows],
            "extra": later["extra"],
            "labels": later["labels"][:, rows],
        }
        for rows in torch.arange(6).tensor_split(3)
    ]
    expected = sum(plain(**part)["loss"] / 3 for part in parts)
    expected.backward()
    torch.testing.assert_close(loss.detach(), expected.detach())
    torch.testing.assert_close(got, plain.head.weight.grad)


def sample(**changes: Any) -> dict[str, Any]:
    return {"ids": ids(3, 5), "labels": torch.zeros(3, 5)} | changes


def test_samples_that_do_not_tell_are_refused() -> None:
    for changes, words in (
        ({"position_ids": torch.zeros(3, 3, 5)}, r"'position_ids' has the shape \(3, 3, 5\)"),
        ({"ids": ids(3, 3)}, r"'ids' has the shape \(3, 3\)"),
        ({"position_ids": torch.zeros(1, 5)}, r"'position_ids' has the shape \(1, 5\)"),
        ({"extra": {"names": ["a", "b", "c"]}}, r"\"extra\['names'\]\" is a list with 3 entries"),
        ({"extra": numpy.zeros((3, 4))}, "'extra' is a ndarray with 3 entries"),
        ({"extra": torch.tensor([0, 4, 9])}, r"'extra' has the shape \(3,\)"),
    ):
        with pytest.raises(ValueError, match=rf"the sample has 3 rows .*of 'ids'.*: {words}.*no other size equals"):
            attach(Model(), sample(**changes), chunks=2, devices=CC)


def test_an_argument_that_is_none_in_the_sample_is_cut_when_it_is_there() -> None:
    model = Model()
    attach(model, sample(extra=None, position_ids=None, labels=torch.zeros(5, 3)), chunks=2, balance=[1, 1], devices=CC)
    model.eval()
    later = {"ids": ids(4, 5), "extra": {"scale": torch.linspace(1, 2, 20).view(4, 5, 1)}}
    with torch.no_grad():
        got = model(**later)
    del model.forward
    torch.testing.assert_close(got, model(**later))


# Values and what their sizes say


Pair = namedtuple("Pair", ["left", "right"])
X = torch.ones(4, 2)


@dataclass
class Batch:
    ids: Tensor
    name: str = "text"


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Holding:
    def __init__(self, value: Any) -> None:
        self.value = value


NAMES: list[tuple[Any, list[str]]] = [
    (X, ["x"]), (None, ["x"]), ([X, 5], ["x", "x[0]", "x[1]"]), ({"a": X, 3: (X,)}, ["x['a']", "x[3]", "x[3][0]"]),
    (OrderedDict(a=X), ["x['a']"]), (Pair(X, 1), ["x.left", "x.right"]), ({0: X, 1: X}, ["x", "x[0]", "x[1]"]),
    (deque([X]), ["x", "x[0]"]), (Batch(X), ["x.ids", "x.name"]), (NoChunk([X]), ["x", "x[0]"]),
]  # fmt: skip


@pytest.mark.parametrize(("value", "names"), NAMES)
def test_names(value: Any, names: list[str]) -> None:
    assert [each.name for each in values_in("x", value)] == names


WITH_FOUR: list[Any] = [
    ["a"] * 4, (1, 2, 3, 4), numpy.zeros((4, 2)), UserDict(ids=torch.zeros(4, 3)), range(4), {1, 2, 3, 4},
    deque("abcd"),
    dict(enumerate("abcd")), Slots(torch.zeros(4)), Holding({"mask": [torch.zeros(4)]}),
    Holding(Holding(torch.zeros(2, 4))), Holding({"names": ["a", "b", "c", "d"]}), iter(["a"]),
]  # fmt: skip
WITHOUT = ["text", b"text", None, 4, X, torch.float32, len, Holding(4), numpy.float32(4), list]


def test_values_with_an_entry_for_each_of_four_rows() -> None:
    for value in WITH_FOUR:
        assert has_entries(value, 4), value
        assert not has_entries(value, 5) or hasattr(value, "__next__"), value  # which can be read once only
    for value in WITHOUT:
        assert not has_entries(value, 4), value


def test_offsets() -> None:
    """They begin with 0 and grow; the numbers of rows, 0, 1, 2, do so too."""
    for values in ([0, 8, 10, 20], [0, 3, 3]):
        assert may_be_offsets(torch.tensor(values)), values
    for values in ([0, 1, 2, 3], [0, 0, 1, 1], [1, 8, 10], [0, 8, 4], [0], [0.0, 8.0, 10.0], [[0, 8], [10, 20]]):
        assert not may_be_offsets(torch.tensor(values)), values
