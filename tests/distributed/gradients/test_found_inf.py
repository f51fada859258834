"""Overflows that all ranks learn of; the ranks are threads here."""

import math
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.distributed import HashStore

from pipework.distributed.gradients.found_inf import FoundInf
from pipework.distributed.transport.groups import group_of


def shared(*gradients: Tensor | None) -> list[Tensor | None]:
    """The gradient of each rank afterwards."""
    store, leaves = HashStore(), [torch.zeros(2, requires_grad=True) for _ in gradients]

    def share(rank: int) -> None:
        leaves[rank].grad = gradients[rank]
        group = group_of(store, "all", range(len(gradients)), rank)
        FoundInf(group, torch.device("cpu")).share(None, [leaves[rank]], [leaves[rank].grad])

    with ThreadPoolExecutor(len(gradients)) as pool:
        list(pool.map(share, range(len(gradients))))
    return [leaf.grad for leaf in leaves]


def test_values_of_a_sparse_gradient_may_overflow_when_they_are_added() -> None:
    largest = torch.full((2,), torch.finfo(torch.float32).max)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), largest, (2,), check_invariants=True)
    _, other = shared(sparse, torch.ones(2))
    assert other is not None
    assert math.isinf(other[0].item())
