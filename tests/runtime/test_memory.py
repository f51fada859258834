import torch

from pipework.runtime.memory import MemoryMeter


def test_what_autograd_saves_is_counted_once_without_parameters() -> None:
    weight = torch.ones(8, 8, requires_grad=True)
    meter = MemoryMeter([weight])
    x = torch.ones(4, 8)
    with meter.measuring(0, 0, [x]):
        y = (x @ weight).tanh()  # saves x, the weight and the result of tanh
        z = y * y  # saves y twice, which is that result again
    assert meter.peak() == x.nbytes + y.nbytes
    with meter.measuring(0, 1, [x]):
        other = (x @ weight).tanh()
    assert meter.peak() == 2 * (x.nbytes + y.nbytes)
    meter.released(0, 0)
    meter.peak()
    assert meter.peak() == x.nbytes + other.nbytes
    z.sum().backward()


def test_a_checkpointed_micro_batch_holds_its_inputs_only() -> None:
    meter = MemoryMeter([])
    x = torch.ones(4, 8, requires_grad=True)
    with meter.measuring(0, 0, [x]):
        x.tanh()
    meter.checkpointed(0, 0, [x])
    meter.peak()
    assert meter.peak() == x.nbytes


def test_the_users_own_hooks_are_still_called() -> None:
    packed: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.numel())
        return tensor + 0

    x = torch.randn(3, requires_grad=True)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor * 2),
        MemoryMeter([]).measuring(0, 0, [x]),
    ):
        y = x.square()
    y.sum().backward()
    assert packed == [3]
    assert torch.equal(x.grad, x * 4)


def test_a_slice_of_the_callers_batch_counts_its_own_rows() -> None:
    weight = torch.ones(8, 8, requires_grad=True)
    first, second = torch.ones(6, 8).tensor_split([2])
    meter = MemoryMeter([weight])
    with meter.measuring(0, 0, [first]):
        kept = first @ weight
    assert meter.peak() == first.nbytes
    with meter.measuring(1, 0, [second]):
        kept = (kept, second @ weight)
    assert meter.peak() == first.nbytes + second.nbytes
