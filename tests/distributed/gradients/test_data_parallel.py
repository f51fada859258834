"""Averages over replicas, which are threads here."""

import gc
import threading
import time
import warnings
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore
from torch.testing._internal.two_tensor import TwoTensor

from pipework.distributed.gradients.data_parallel import DataParallel
from pipework.distributed.transport.groups import LostConnectionError, group_of
from tests.helpers import in_threads, outcomes_in_threads


@pytest.fixture
def pair() -> list[DataParallel]:
    store = HashStore()
    return outcomes_in_threads(
        *[lambda rank=rank: DataParallel(group_of(store, "all", (0, 1), rank), (0, 1), None, 2) for rank in (0, 1)]
    )


def leaf(gradient: list[float] | None, dtype: torch.dtype = torch.float32) -> Tensor:
    made = torch.zeros(3, dtype=dtype, requires_grad=True)
    made.grad = None if gradient is None else torch.tensor(gradient, dtype=dtype)
    return made


def test_the_mean_of_what_is_there(pair: list[DataParallel]) -> None:
    leaves = [
        [leaf([2.0, 4.0, 6.0]), leaf([1.0] * 3, torch.bfloat16), leaf(None), leaf([1 + 2j] * 3, torch.complex64)],
        [leaf(None), leaf([0.0] * 3, torch.bfloat16), leaf(None), leaf([1 - 4j] * 3, torch.complex64)],
    ]

    def step(replica: DataParallel, own: list[Tensor]) -> None:
        replica.compare(own)
        replica.begin(own[:2])
        replica.begin(own[2:])
        replica.begin([])
        replica.finish()

    in_threads(*[lambda r=r, o=o: step(r, o) for r, o in zip(pair, leaves, strict=True)])
    for first, half, nothing, complex_one in leaves:
        assert first.grad is not None
        assert first.grad.tolist() == [1.0, 2.0, 3.0]
        assert half.grad is not None
        assert half.grad.tolist() == [0.5] * 3
        assert half.grad.dtype is torch.bfloat16
        assert nothing.grad is None
        assert complex_one.grad is not None
        assert complex_one.grad.tolist() == [1 - 1j] * 3


def test_what_is_no_array_is_refused_by_name(pair: list[DataParallel]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    for odd, words in (
        (torch.eye(3).to_sparse(), r"0.edges \(Tensor, torch.float32, torch.sparse_coo\) cannot be sent"),
        (quantized, r"torch\.quint8, torch\.strided\) cannot be sent"),
        (TwoTensor(torch.ones(2), torch.ones(2)), r"\(TwoTensor, "),
    ):
        with pytest.raises(TypeError, match=words):
            pair[0].share_values([("0.edges", odd)], [])


def test_a_sparse_gradient_is_no_lost_connection(pair: list[DataParallel]) -> None:
    layer = nn.Embedding(5, 3, sparse=True)
    layer(torch.arange(2)).sum().backward()
    with pytest.raises(TypeError, match=r"shape .5, 3. has the layout torch.sparse_coo.* without sparse=True"):
        pair[0].begin([layer.weight])


@pytest.mark.parametrize("when", ["before", "meanwhile", "after"])
def test_nothing_is_kept_after_an_abort(pair: list[DataParallel], when: str) -> None:
    replica = pair[0]
    own = leaf([1.0, 2.0, 3.0])
    known = nn.Parameter(torch.ones(3))
    replica.compare([known])
    if when == "before":  # as another thread may: a step that has failed elsewhere still runs here
        replica.abort()
    with replica._lock:
        replica._comparison = None  # the other replica never takes part
    replica.begin([own])
    assert own.grad is not None
    assert own.grad._base is not None
    bucket = weakref.ref(own.grad._base)
    if when == "after":
        replica.abort()
    if when == "meanwhile":
        threading.Timer(0.3, replica.abort).start()
    with pytest.raises(LostConnectionError) as caught:  # the error is kept, and leads to the frames below
        replica.finish()
    own.grad = None
    assert caught.value is not None
    deadline = time.monotonic() + 10
    while bucket() is not None and time.monotonic() < deadline:  # the thread that was aborted may still be leaving
        gc.collect()
        time.sleep(0.01)
    assert bucket() is None
    with pytest.raises(LostConnectionError):
        replica.finish()


def test_replicas_that_train_different_parameters(pair: list[DataParallel]) -> None:
    pairs = [{name: nn.Parameter(torch.ones(2)) for name in "abc"} for _ in range(2)]

    def step(replica: DataParallel, own: dict[str, nn.Parameter], names: str) -> None:
        replica.compare([own[name] for name in names])
        replica.begin([])

    def step_of_both(first: str, second: str) -> list[object]:
        return outcomes_in_threads(lambda: step(pair[0], pairs[0], first), lambda: step(pair[1], pairs[1], second))

    in_threads(*[lambda r=r, o=o: r.share_values(o.items(), [*o.items()]) for r, o in zip(pair, pairs, strict=True)])
    assert step_of_both("abc", "abc") == step_of_both("ac", "ac") == [None, None]
    for error in step_of_both("ac", "bc"):
        assert isinstance(error, ValueError)
        assert "different parameters: a, b are trained by some of them only" in str(error)
    for own in pairs:
        own["a"] = nn.Parameter(torch.ones(4))  # a new one on both
    assert step_of_both("ab", "ab") == [None, None]
    pairs[0]["a"].data = torch.ones(5)
    for error in step_of_both("ab", "ab"):
        assert isinstance(error, ValueError)
        assert "their shapes, dtypes or order differ" in str(error)
    pairs[1]["a"] = nn.Parameter(torch.ones(5))
    assert step_of_both("ab", "ab") == [None, None]
