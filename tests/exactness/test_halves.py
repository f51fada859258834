"""Mini-batches under the schedules that split backwards: what is done once is done once, and the bits are right."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from pipework.schedule import build
from tests.conftest import WAYS
from tests.ranks import held, layers_of_stages
from tests.tiers import sampled

CHUNKS = 4
SPLIT = tuple(
    name for name in WAYS if name != "outside" and "I" in {a.kind for a in build(name, workers=2, chunks=4).orders[0]}
)
BALANCE = [1, 1, 1, 1]

every_way = pytest.mark.parametrize("way", SPLIT, indirect=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.calls: list[int] = []  # the first row's number

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(round(float(x.detach().flatten()[0])))
        return x + 0.01 * torch.tanh(self.linear(x))


def numbered() -> Tensor:
    """Each micro-batch has its number in its rows, which the blocks hardly change."""
    return torch.arange(CHUNKS).repeat_interleave(2)[:, None].expand(-1, 6) * 1.0


@every_way
def test_a_checkpointed_micro_batch_is_computed_once_more_and_not_again_for_its_weights(
    way: Any, checkpoint: str
) -> None:
    pipe = way.pipe(nn.Sequential(*(Block() for _ in range(4))), CHUNKS, checkpoint, balance=BALANCE)
    for _ in range(2):
        way.loss(pipe, numbered(), torch.randn(2 * CHUNKS)).backward()
    # One that goes back right after its forward is not dropped in between.
    again = [(a.stage, a.micro_batch) for order in pipe.schedule().orders for a in order if a.kind == "R"]
    for stage, block in layers_of_stages(pipe):
        expected = [m for m in range(CHUNKS) for _ in range(2 * (1 + again.count((stage, m))))]
        assert sorted(block.calls) == expected
    assert len(set(again)) == len(again)
    assert bool(again) == (checkpoint != "never")


@every_way
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_pytorchs_own_checkpoint_computes_once_more(
    way: Any, use_reentrant: bool, assert_trained_alike: Callable[..., None]
) -> None:
    class Checkpointed(Block):
        def forward(self, x: Tensor) -> Tensor:
            return torch_checkpoint.checkpoint(super().forward, x, use_reentrant=use_reentrant)

    plain = nn.Sequential(*(Checkpointed() for _ in range(4)))
    pipe = way.pipe(plain, CHUNKS, "never", balance=BALANCE)
    x = numbered().requires_grad_()  # a reentrant one without such an input has no gradients at all
    assert_trained_alike(plain, pipe, [(x,)], way=way)
    for expected, actual in zip(held(plain, pipe), pipe, strict=True):
        assert sorted(actual.calls) == sorted(expected.calls) == sorted([*range(CHUNKS)] * 2)


def compiled_in_place(backend: str) -> nn.Module:
    block = Compiled()
    block.compile(backend=backend)
    return block


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class CompiledMethod(Compiled):
    """What is compiled is given parameters, and no module says so."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.forward = torch.compile(self.forward, backend=backend)  # type: ignore[method-assign]


@pytest.mark.parametrize("way", ["1f1b", "zb-h1", "zb-v"], indirect=True)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.thorough
def test_a_compiled_method_may_use_parameters(
    way: Any, backend: str, assert_trained_alike: Callable[..., None]
) -> None:
    torch._dynamo.reset()
    plain, layers = (nn.Sequential(*(CompiledMethod(backend) for _ in range(4))) for _ in range(2))
    layers.load_state_dict(plain.state_dict())
    pipe = way.pipe(layers, CHUNKS, "never", balance=BALANCE, share=True)
    assert_trained_alike(plain, pipe, [(torch.randn(8, 6),) for _ in range(3)], way=way)


COMPILED: dict[str, Callable[[str], nn.Module]] = {
    "in place": compiled_in_place,
    "wrapped": lambda backend: torch.compile(Compiled(), backend=backend),  # type: ignore[dict-item]
    "inside of another": lambda backend: nn.Sequential(compiled_in_place(backend)),
}


@pytest.mark.parametrize(
    ("how", "backend", "checkpoint", "way"),
    sampled(COMPILED, ["eager", "aot_eager"], ["never", "always"], ["zb-h1", "zb-v", "interleaved-zb"], each=2),
    indirect=["way"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.thorough
def test_a_compiled_layer_forms_its_whole_gradient_at_once_and_nothing_waits(
    way: Any, how: str, backend: str, checkpoint: str, assert_trained_alike: Callable[..., None]
) -> None:
    torch._dynamo.reset()
    plain, layers = (nn.Sequential(*(COMPILED[how](backend) for _ in range(4))) for _ in range(2))
    layers.load_state_dict(plain.state_dict())
    pipe = way.pipe(layers, CHUNKS, checkpoint, balance=BALANCE, share=True)
    assert_trained_alike(plain, pipe, [(torch.randn(8, 6),) for _ in range(3)], way=way)
    with pipe.record() as recording:
        way.loss(pipe, torch.randn(8, 6), torch.randn(8)).backward()
    assert recording.costs().waiting == (0,) * len(pipe.balance)
    ordinary = way.pipe(nn.Sequential(*(Compiled() for _ in range(4))), CHUNKS, checkpoint, balance=BALANCE)
    with ordinary.record() as recording:
        way.loss(ordinary, torch.randn(8, 6), torch.randn(8)).backward()
    assert min(recording.costs().waiting) > 0


@every_way
def test_under_autocast(way: Any, checkpoint: str) -> None:
    attention = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
    plain = nn.Sequential(nn.Linear(6, 6), attention, nn.Conv1d(5, 5, 3, padding=1), nn.Linear(6, 6))
    pipe = way.pipe(copy.deepcopy(plain), CHUNKS, checkpoint, balance=BALANCE)
    x, y = torch.randn(8, 5, 6), torch.randn(8)
    with torch.autocast("cpu", torch.bfloat16):
        way.reference(plain, x, y, CHUNKS, key=0)
        loss = way.loss(pipe, x, y)
    loss.backward()
    for expected, actual in zip(held(plain, pipe).parameters(), pipe.parameters(), strict=True):
        assert torch.equal(actual.grad, expected.grad)


class InFullPrecision(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


@pytest.mark.one_process("compares pipes whose stages are on other workers")
@every_way
def test_halves_of_a_layer_that_leaves_autocast_are_not_rounded(way: Any) -> None:
    layers = nn.Sequential(*(InFullPrecision(6, 6) for _ in range(4)))
    x, y = torch.randn(8, 6), torch.randn(8)
    pipes = [each.pipe(copy.deepcopy(layers), CHUNKS, "never", balance=BALANCE) for each in (way, WAYS["1f1b"])]
    for pipe, each in zip(pipes, (way, WAYS["1f1b"]), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = each.loss(pipe, x, y)
        loss.backward()
    for actual, expected in zip(*(pipe.parameters() for pipe in pipes), strict=True):
        assert torch.equal(actual.grad, expected.grad)


class Casts(TorchDispatchMode):
    """Counts how often each parameter is turned into another type."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self.counts = {parameter.data_ptr(): 0 for parameter in parameters}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.counts:
            self.counts[args[0].data_ptr()] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", ["gpipe", "1f1b", *SPLIT], indirect=True)
def test_autocast_casts_each_parameter_once_in_a_mini_batch(way: Any) -> None:
    """In the first one, in which autograd's own way is tried before the other, it may be twice."""
    pipe = way.pipe(nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))), CHUNKS, "never", balance=BALANCE)
    for mini_batch in range(3):
        with Casts(pipe.parameters()) as casts, torch.autocast("cpu", torch.bfloat16):
            way.loss(pipe, torch.randn(8, 6), torch.randn(8)).backward()
        assert set(casts.counts.values()) <= ({1, 2} if mini_batch == 0 else {1})
