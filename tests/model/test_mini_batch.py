from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipework import MicroBatches, Pipe
from pipework.model.marks import NoChunk
from pipework.model.mini_batch import gradients_are_there, join, split
from pipework.values.nested import unflatten


def targets_of(target: object, rows: int, chunks: int) -> list[Any]:
    batch = split((torch.zeros(rows, 1),), {}, chunks)
    batch.cut_target(target, torch.device("cpu"))
    return batch.targets or []


sizes = st.integers(0, 20)
chunk_counts = st.integers(1, 9)


@given(sizes, chunk_counts)
def test_split_covers_all_rows_in_order_as_evenly_as_possible(rows: int, chunks: int) -> None:
    x = torch.arange(rows * 2.0).view(rows, 2)
    parts = split((x,), {}, chunks)
    assert len(parts.micro_batches) == max(1, min(chunks, rows))
    assert torch.equal(torch.cat([message[0][0] for message in parts.micro_batches]), x)
    assert parts.rows == [len(message[0][0]) for message in parts.micro_batches]
    assert max(parts.rows) - min(parts.rows) <= 1


@given(sizes, chunk_counts)
def test_joining_undoes_splitting(rows: int, chunks: int) -> None:
    x = torch.randn(rows, 3)
    parts = split((x,), {}, chunks)
    joined = join(parts.micro_batches, parts.rows)
    assert torch.equal(joined.tensors[0], x)
    gradients = joined.cut([x * 2])
    assert torch.equal(torch.cat([gradient for (gradient,) in gradients]), x * 2)
    assert torch.equal(parts.pieces.join([(gradient, None) for gradient in gradients])[0], x * 2)


def test_micro_batches_share_memory_and_are_leaves_like_the_whole() -> None:
    x, y = torch.zeros(4, 1, requires_grad=True), torch.zeros(4, 1)
    parts = split((x, y), {}, 2)
    for message in parts.micro_batches:
        assert [tensor.requires_grad for tensor in message[0]] == [True, False]
        assert all(tensor.is_leaf for tensor in message[0])
    assert parts.micro_batches[0][0][0].data_ptr() == x.data_ptr()


def test_scalars_are_averaged_by_rows() -> None:
    outputs = [((torch.tensor(value),), None) for value in (1.0, 4.0)]
    joined = join(outputs, [3, 1])
    assert joined.tensors[0].item() == 1.0 * 0.75 + 4.0 * 0.25
    assert joined.cut([torch.tensor(1.0)]) == [(torch.tensor(0.75),), (torch.tensor(0.25),)]


def test_a_micro_batch_without_an_input_gradient_contributes_zeros() -> None:
    splits = split((torch.zeros(3, 2),), {}, 2).pieces
    (gradient,) = splits.join([((None,), None), ((torch.ones(1, 2),), None)])
    assert torch.equal(gradient, torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]))
    assert splits.join([((None,), None), ((None,), None)]) == [None]


def test_a_whole_tensor_goes_to_every_micro_batch_and_gets_the_sum() -> None:
    mask = torch.ones(1, 3, requires_grad=True)
    parts = split((torch.zeros(4, 3), NoChunk(mask)), {}, 2)
    assert [tuple(tensor.shape) for tensor in parts.micro_batches[1][0]] == [(2, 3), (1, 3)]
    _, gradient = parts.pieces.join([((None, torch.ones(1, 3)), None), ((None, torch.ones(1, 3)), None)])
    assert torch.equal(gradient, torch.full((1, 3), 2.0))


def test_unequal_rows_name_the_ways_out() -> None:
    with pytest.raises(ValueError, match=r"\(4, 1\).*\(1, 1, 3, 3\).*Chunk.*NoChunk"):
        split((torch.zeros(4, 1), torch.zeros(1, 1, 3, 3)), {}, 2)


# Targets


def test_targets_are_split_like_the_inputs_whatever_they_are_nested_in() -> None:
    mask = torch.ones(2, 2)
    target = {"label": torch.arange(5), "more": [(torch.zeros(5, 2), "text"), NoChunk(mask)], "none": None}
    parts = [unflatten(*message) for message in targets_of(target, 5, 3)]
    assert [part["label"].tolist() for part in parts] == [[0, 1], [2, 3], [4]]
    assert [tuple(part["more"][0][0].shape) for part in parts] == [(2, 2), (2, 2), (1, 2)]
    assert all(part["more"][0][1] == "text" and torch.equal(part["more"][1], mask) for part in parts)
    assert all(part["none"] is None for part in parts)


def number(*required: bool, rows: int = 4, chunks: int = 2) -> int:
    tensors = tuple(torch.zeros(rows, 2, requires_grad=each) for each in required)
    return split(tensors, {}, chunks).required_gradients


def test_a_part_of_what_is_computed_may_be_wanted() -> None:
    both = number(True, True)
    assert number(False, False) == 0
    assert all(gradients_are_there(wanted, both) for wanted in (0, number(True, False), number(False, True), both))
    assert not gradients_are_there(both, number(True, False))
    assert not gradients_are_there(both, 0)


def test_other_tensors_have_other_gradients() -> None:
    computed = number(True, True)
    for other in (number(True), number(True, True, True), number(True, True, rows=5), number(True, True, chunks=4)):
        assert not gradients_are_there(other, computed)


def test_of_many_tensors_it_is_a_number_of_64_bits() -> None:
    assert 0 < number(*[True] * 100) < 2**63


@pytest.mark.gpu
@pytest.mark.parametrize("given", [False, True])
def test_a_cpu_worker_reads_what_the_accelerator_has_finished(given: bool) -> None:
    gpu = torch.accelerator.current_accelerator()
    busy = torch.ones(1024, 1024, device=gpu)
    pipe = Pipe(nn.Sequential(nn.Identity(), nn.Identity()), 2, balance=[1, 1], devices=["cpu", "cpu"])
    expected = torch.randn(4, 8)
    source, x = expected.to(gpu), torch.full((4, 8), torch.nan, device=gpu)
    torch.accelerator.synchronize()
    with torch.no_grad():
        for _ in range(3):
            x.fill_(torch.nan)
            for _ in range(20):
                torch.mm(busy, busy)
            x.copy_(source)
            output = pipe(MicroBatches(x.split(2)) if given else x)
            tensors: list[Tensor] = list(output) if given else [output]
            assert torch.equal(torch.cat(tensors), expected)
