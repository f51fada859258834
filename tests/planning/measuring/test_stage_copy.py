"""Measurements run on copies, and restore the settings that they change."""

import pytest
import torch

from pipework.planning.measuring.stage_copy import cut, entered, tensors_of, threads_of_a_worker, traceless

CPU = torch.device("cpu")


def test_cut_tensors_are_leaves_with_memory_of_their_own() -> None:
    x = torch.ones(2, requires_grad=True)
    value = cut({"a": 2 * x, "b": (torch.ones(1), 5)}, CPU)
    assert value["a"].is_leaf
    assert value["a"].requires_grad
    assert not value["b"][0].requires_grad
    assert len(tensors_of(value)) == 2
    value["b"][0].zero_()


def test_a_layer_may_overwrite_what_it_gets() -> None:
    leaf = cut(torch.ones(2, requires_grad=True), CPU)
    entered(leaf).mul_(3).sum().backward()
    assert leaf.grad.tolist() == [3.0, 3.0]


def test_random_states_and_grad_mode_are_restored() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    with torch.no_grad():
        with traceless(CPU):
            assert torch.is_grad_enabled()
            torch.rand(5)
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(("workers", "threads"), [(1, 4), (2, 2), (8, 1)])
def test_a_worker_has_its_share_of_the_threads(workers: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with threads_of_a_worker(workers):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
