import weakref

import torch
from torch import nn

from pipework import Pipe, pop, skippable
from pipework.runtime.stage.memory_meter import MemoryMeter
from pipework.schedule import from_csv
from tests.helpers import Stash


def peak(meter: MemoryMeter) -> int:
    most, _, _ = meter.read(0, 0)
    return most


def test_what_autograd_saves_is_counted_once_without_parameters() -> None:
    weight = torch.ones(8, 8, requires_grad=True)
    meter = MemoryMeter([weight])
    x = torch.ones(4, 8)
    with meter.measuring(0, 0, [x]):
        y = (x @ weight).tanh()  # saves x, the weight and the result of tanh
        z = y * y  # saves y twice, which is that result again
    assert peak(meter) == x.nbytes + y.nbytes
    with meter.measuring(0, 1, [x]):
        other = (x @ weight).tanh()
    assert peak(meter) == 2 * (x.nbytes + y.nbytes)
    meter.released(0, 0)
    peak(meter)
    assert peak(meter) == x.nbytes + other.nbytes
    z.sum().backward()


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


def test_what_a_micro_batch_holds_and_what_was_sent() -> None:
    x, skip = torch.ones(4, 8, requires_grad=True), torch.ones(4, 2, requires_grad=True)
    meter = MemoryMeter([])
    with meter.measuring(0, 3, [x, skip]):
        joined = torch.cat([skip * 1, x * 1], dim=1)  # nothing of this is saved, and the inputs are held all the same
    meter.sending([joined])
    held = x.nbytes + skip.nbytes
    assert meter.read(0, 3) == (held, held, joined.nbytes)
    meter.released(0, 3)
    assert meter.read(0, 3)[1:] == (0, 0)
    with torch.no_grad(), meter.measuring(0, 0, [x]):  # without a backward to come
        x.tanh()
    assert peak(meter) == 0


@skippable(pop=["skip"])
class Join(nn.Module):
    def forward(self, x: torch.Tensor):
        features = yield pop("skip")
        return torch.cat([features, x], dim=1)


def test_recorded_memory_has_what_a_stage_popped_and_copies_of_buffers() -> None:
    layers = nn.Sequential(Stash(), nn.Conv2d(2, 2, 1), Join(), nn.BatchNorm2d(4))
    pipe = Pipe(layers, chunks=3, checkpoint="except_last", balance=[2, 2], devices=["cpu", "cpu"])
    with pipe.record() as recording:
        pipe(torch.randn(3, 2, 3, 3, requires_grad=True)).sum().backward()
    received = 2 * torch.zeros(1, 2, 3, 3).nbytes  # the value and the skip, of which cat saves neither
    statistics = sum(buffer.nbytes for buffer in layers[3].buffers())
    assert recording.costs().checkpoint_activation[1] == received + statistics
    joined, mean_and_deviation = received, 2 * 4 * 4
    last = max(interval.memory for interval in recording.timeline().by_worker[1] if interval.action.kind == "F")
    assert last == 2 * (received + statistics) + received + joined + mean_and_deviation


def test_a_slice_of_the_target_counts_its_own_rows_if_the_loss_saves_it() -> None:
    meter = MemoryMeter([])
    x, target = torch.ones(2, 8, requires_grad=True), torch.zeros(100, 8)[2:4]
    with meter.measuring(0, 0, [x], [target]):
        nn.functional.mse_loss(x, target)
    assert meter.read(0, 0)[1] == x.nbytes + target.nbytes
    with meter.measuring(0, 1, [x], [target]):
        (x - target).tanh()
    assert meter.read(0, 1)[1] == 2 * x.nbytes


def test_a_slice_of_the_callers_batch_that_waits_for_its_weights_counts_its_own_rows() -> None:
    """The first layer's weight needs the rows that the caller gave, and not those of the other micro-batches."""
    waiting = []
    for chunks in (2, 8):
        layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        pipe = Pipe(
            layers,
            chunks,
            "never",
            balance=[1, 1],
            devices=["cpu"] * 2,
            schedule="zb-h1",
            loss_fn=nn.functional.mse_loss,
        )
        with pipe.record() as recording:
            pipe(torch.randn(2 * chunks, 4), target=torch.randn(2 * chunks, 4)).backward()
        waiting.append(recording.timeline().by_worker[0])
    rows = torch.zeros(2, 4).nbytes
    for line in waiting:
        assert max(each.held for each in line if each.action.kind == "I") == 2 * rows  # the input, and a gradient


def test_between_the_halves_nothing_is_alive_but_what_the_weights_need() -> None:
    """What an operator keeps must not lead to the stage's input: its graph would keep that and its gradient."""
    seen: list[weakref.ref[torch.UntypedStorage]] = []
    alive: list[list[bool]] = []

    class Look(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            alive.append([each() is not None for each in seen])
            seen.append(weakref.ref(x.untyped_storage()))
            return x.tanh()  # saves what comes out

    order = "0F0,1F0,1I0,0I0,1W0,0W0,0F1,1F1,1I1,0I1,0F2,1F2,1W1,0W1,1I2,0I2,1W2,0W2"  # F2 between I1 and W1
    layers = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Look(), nn.Linear(4, 1)))
    pipe = Pipe(
        layers, 3, "never", balance=[1, 1], devices=["cpu"], schedule=from_csv(order),
        loss_fn=nn.functional.mse_loss,
    )  # fmt: skip
    pipe(torch.randn(6, 4), target=torch.zeros(6, 1)).backward()
    assert alive == [[], [False], [False, False]]
