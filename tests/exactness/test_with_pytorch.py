"""The pipe beside the rest of PyTorch: compiled layers, scalers, hooks, parametrizations, autocast, other modes."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils import checkpoint as torch_checkpoint

from pipework import Pipe
from tests.ranks import held, layers_of_stages

INSIDE = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize(
    ("way", "backend"),
    [
        ("outside", "eager"),
        ("outside", "aot_eager"),
        ("1f1b", "eager"),
        ("interleaved-1f1b", "aot_eager"),
        *(pytest.param(way, "inductor", marks=pytest.mark.slow) for way in ("outside", "1f1b", "interleaved-1f1b")),
    ],
    indirect=["way"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.thorough
def test_compiled_layers(way: Any, checkpoint: str, backend: str) -> None:
    torch._dynamo.reset()
    plain = nn.Sequential(*(Block() for _ in range(4)))
    pipe = way.pipe(plain, 3, checkpoint, balance=[1, 1, 1, 1])
    for layer in (*plain, *pipe):
        layer.compile(backend=backend)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, pipe)]
    for _ in range(3):
        x, y = torch.randn(6, 8), torch.randn(6)
        way.reference(plain, x, y, 1, key=0)
        way.loss(pipe, x, y).backward()
        for expected, actual in zip(gradients(held(plain, pipe)), gradients(pipe), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.one_process("watches what all layers do, in one process")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_compiled_layers_are_not_compiled_again_for_each_mini_batch() -> None:
    torch._dynamo.reset()
    compilations = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        compilations.append(graph)
        return graph.forward

    layer = Block()
    layer.compile(backend=count, dynamic=False)
    pipe = Pipe(nn.Sequential(nn.Linear(8, 8), layer), 2, "never", balance=[1, 1], devices=["cpu"] * 2)
    for _ in range(15):
        pipe(torch.randn(4, 8)).sum().backward()
        pipe.zero_grad()
    # The first micro-batch of a mini-batch comes as an alias of a leaf, the others as leaves: at most one each.
    assert len(compilations) <= 2


@pytest.mark.parametrize("knows", [False, True])
def test_grad_scaler_scales_and_skips_an_overflow(way: Any, knows: bool) -> None:
    """Whether the pipe knows the scaler, so that gradients are scaled in it, too, or not."""
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    pipe = way.pipe(plain, 3, "never", balance=[1, 1, 1, 1], grad_scaler=scaler if knows else None)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    x, y = torch.randn(6, 8), torch.randn(6)
    way.reference(plain, x, y, 3, key=0)
    for _ in range(2):  # the second time, the scale has grown
        optimizer.zero_grad()
        loss = way.loss(pipe, x, y)
        scaler.scale(loss).backward()
        assert torch.equal(gradients(pipe)[0], gradients(held(plain, pipe))[0] * scaler.get_scale())
        scaler.unscale_(optimizer)
        assert all(map(torch.equal, gradients(pipe), gradients(held(plain, pipe))))
        with torch.no_grad():
            optimizer.zero_grad()  # the step changes nothing, so that the comparison holds again
        scaler.step(optimizer)
        scaler.update(scaler.get_scale() * 2)
    before = copy.deepcopy(pipe.state_dict())
    (scaler.scale(way.loss(pipe, x, y)) * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(map(torch.equal, before.values(), pipe.state_dict().values()))
    assert scaler.get_scale() < 2.0**12


@pytest.mark.parametrize("way", INSIDE, indirect=True)
def test_small_gradients_in_float16_survive_if_the_pipe_knows_the_scaler(way: Any) -> None:
    def tiny(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output.float() * target).mean() * 1e-8

    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4))
    x, y = torch.randn(6, 8), torch.randn(6, 4)
    exact = copy.deepcopy(plain).double()
    tiny(exact(x.double()), y).backward()
    assert gradients(exact)[0].abs().max() < 1e-8
    for knows in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        pipe = way.pipe(plain, 3, balance=[1, 1, 1, 1], loss_fn=tiny, grad_scaler=scaler if knows else None)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = pipe(x, target=y)
        if not knows:
            with pytest.raises(RuntimeError, match=r"before its backward, as a GradScaler does.*grad_scaler=scaler"):
                scaler.scale(loss).backward()
            assert gradients(pipe) == [None] * len(gradients(pipe))
            pipe.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                (pipe(x, target=y) / 4).backward()
            assert not any(gradient.any() for gradient in gradients(pipe)), "all of them vanish without the scaler"
            continue
        scaler.scale(loss).backward()
        for gradient, expected in zip(gradients(pipe), gradients(held(exact, pipe)), strict=True):
            torch.testing.assert_close(gradient.double() / 2**16, expected, rtol=0.05, atol=2e-11)


@pytest.mark.parametrize("way", ["1f1b"], indirect=True)
@pytest.mark.parametrize("case", ["float16 parameters", "loss_scale", "float32", "a small factor", "later"])
def test_a_factor_is_taken_for_a_scaler_only_where_gradients_are_in_float16_and_have_no_scale(
    way: Any, case: str
) -> None:
    half, other = case == "float16 parameters", {"loss_scale": 2.0} if case == "loss_scale" else {}
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    pipe = way.pipe(plain.half() if half else plain, 3, balance=[1, 1, 1, 1], loss_fn=F.mse_loss)
    x, y = torch.randn(6, 8, dtype=plain[0].weight.dtype), torch.randn(6, 4, dtype=plain[0].weight.dtype)
    for _ in range(4 if case == "later" else 0):
        pipe(x, target=y).backward()
    with torch.autocast("cpu", dtype=torch.float16, enabled=not half and case != "float32"):
        loss = pipe(x, target=y, **other)
    with pytest.raises(RuntimeError, match="as a GradScaler does") if half else contextlib.nullcontext():
        (loss * (64 if case == "a small factor" else 1024)).backward()


@pytest.mark.parametrize("way", INSIDE, indirect=True)
def test_a_scale_that_changes_before_the_backward_is_the_outer_one(way: Any) -> None:
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    pipe = way.pipe(plain, 3, balance=[1, 1, 1, 1], grad_scaler=scaler)
    x, y = torch.randn(6, 8), torch.randn(6)
    way.reference(plain, x, y, 3, key=0)
    loss = pipe(x, target=y)
    loss.backward()  # without the scaler
    assert all(map(torch.equal, gradients(pipe), gradients(held(plain, pipe))))


def coarse() -> saved_tensors_hooks:
    """Saves what backward needs in half the bytes, which changes gradients visibly."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.bfloat16) if tensor.dtype == torch.float32 else tensor

    return saved_tensors_hooks(pack, lambda packed: packed.float() if packed.dtype == torch.bfloat16 else packed)


SETTINGS: dict[str, Callable[[], Any]] = {
    "on the CPU": save_on_cpu,
    "coarse": coarse,
    "autocast without a cache": lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("around_backward", [True, False])
def test_saved_tensor_hooks_and_autocast_of_the_forward_hold_in_recomputations(
    way: Any, checkpoint: str, setting: str, around_backward: bool
) -> None:
    plain = nn.Sequential(*(nn.Sequential(Block(), nn.LayerNorm(8)) for _ in range(4)))
    untouched = copy.deepcopy(plain)
    pipe = way.pipe(plain, 3, checkpoint, balance=[1, 1, 1, 1])
    x, y = torch.randn(7, 8), torch.randn(7)
    with SETTINGS[setting]():
        expected = way.reference(plain, x, y, 3, key=0)
        loss, output = way.run(pipe, x, y)
        if around_backward:
            loss.backward()
    if not around_backward:
        loss.backward()
    assert torch.equal(output, expected.output)
    assert all(map(torch.equal, gradients(pipe), gradients(held(plain, pipe))))
    way.reference(untouched, x, y, 3, key=0)
    changed = not torch.equal(gradients(untouched)[0], gradients(plain)[0])
    assert changed or setting != "coarse", "the setting makes no difference, so this test would see none"


# Autocast


class SeenInBackward(torch.autograd.Function):
    """Notes whether autocast is on, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: list[tuple[str, bool]]) -> torch.Tensor:
        ctx.seen = seen
        seen.append(("forward", torch.is_autocast_enabled("cpu")))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.seen.append(("backward", torch.is_autocast_enabled("cpu")))
        return gradient, None


def test_forward_and_recomputation_have_the_callers_autocast_and_the_backward_has_none(
    way: Any, checkpoint: str
) -> None:
    seen: list[tuple[str, bool]] = []

    class Look(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return SeenInBackward.apply(super().forward(x), seen)

    plain = nn.Sequential(*(Look() for _ in range(4)))
    pipe = way.pipe(plain, 3, checkpoint, balance=[1, 1, 1, 1])
    x, y = torch.randn(6, 8), torch.randn(6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = way.loss(pipe, x, y)
    loss.backward()
    assert seen.count(("backward", False)) == len(pipe) * 3
    stages = [action.stage for order in pipe.schedule().orders for action in order if action.kind == "R"]
    again = sum(stages.count(stage) for stage, _ in layers_of_stages(pipe))
    assert bool(stages) == (checkpoint != "never")
    assert seen.count(("forward", True)) == len(pipe) * 3 + again
    assert len(seen) == len(pipe) * (3 + 3) + again
    with torch.autocast("cpu", dtype=torch.bfloat16):
        way.reference(plain, x, y, 3, key=0)
    assert gradients(pipe)[0].dtype == torch.float32
    assert all(map(torch.equal, gradients(held(plain, pipe)), gradients(pipe)))


class Gated(nn.Module):
    """Two layers cast the input, and what goes on is half of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(8, 16), nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.value(x) * self.gate(x)).float().chunk(2, dim=-1)[0]


def test_autocast_treats_the_input_of_a_stage_as_a_tensor_within_a_model(way: Any, checkpoint: str) -> None:
    """A leaf it would cast once, and sum the gradients of both layers in bfloat16."""
    plain = nn.Sequential(*(Gated() for _ in range(4)))
    pipe = way.pipe(plain, 3, checkpoint, balance=[1, 1, 1, 1])
    x, y = torch.randn(6, 5, 8), torch.randn(6)
    of_plain, of_pipe = x.clone().requires_grad_(), x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        way.reference(plain, of_plain, y, 3, key=0)
        loss = way.loss(pipe, of_pipe, y)
    loss.backward()
    assert torch.equal(of_pipe.grad, of_plain.grad)
    assert all(map(torch.equal, gradients(held(plain, pipe)), gradients(pipe)))


@pytest.mark.one_process("changes or looks at layers by their position")
def test_module_hooks_see_every_micro_batch(way: Any) -> None:
    seen: list[tuple[str, tuple[int, ...]]] = []
    pipe = way.pipe(nn.Sequential(*(Block() for _ in range(4))), 3, "never", balance=[1, 1, 1, 1])
    pipe[1].register_forward_hook(lambda m, i, o: seen.append(("forward", tuple(o.shape))))
    pipe[2].linear.register_full_backward_hook(lambda m, i, o: seen.append(("backward", tuple(o[0].shape))))
    way.loss(pipe, torch.randn(6, 8), torch.randn(6)).backward()
    assert sorted(seen) == [("backward", (2, 8))] * 3 + [("forward", (2, 8))] * 3


@pytest.mark.one_process("changes or looks at layers by their position")
def test_recurrent_layers_work_alone_after_a_mini_batch() -> None:
    class First(nn.Module):
        def forward(self, outputs: torch.Tensor, state: object) -> torch.Tensor:
            return outputs

    lstm = nn.LSTM(8, 8, batch_first=True)
    pipe = Pipe(nn.Sequential(lstm, First(), nn.Linear(8, 1)), 3, balance=[1, 2], devices=["cpu"] * 2)
    x = torch.randn(6, 5, 8)
    pipe(x).sum().backward()
    from_pipe = lstm.weight_ih_l0.grad.clone()
    pipe.zero_grad()
    pipe[2](lstm(x)[0]).sum().backward()
    torch.testing.assert_close(lstm.weight_ih_l0.grad, from_pipe)


@pytest.mark.one_process("two pipes share layers")
def test_two_pipes_with_different_schedules_may_share_layers() -> None:
    module = nn.Sequential(*(Block() for _ in range(4)))
    pipes = [
        Pipe(module, 3, balance=[1, 1, 1, 1], devices=["cpu"] * 2, schedule=name, loss_fn=F.mse_loss)
        for name in ("interleaved-1f1b", "looped-bfs")
    ]
    x, y = torch.randn(6, 8), torch.randn(6, 8)
    sum(pipe(x, target=y) for pipe in pipes).backward()
    twice = [gradient.clone() for gradient in gradients(module)]
    module.zero_grad()
    pipes[1](x, target=y).backward()
    for gradient, whole in zip(gradients(module), twice, strict=True):
        assert torch.equal(whole, 2 * gradient)


def test_inference_mode_between_training_steps(way: Any) -> None:
    pipe = way.pipe(nn.Sequential(*(Block() for _ in range(4))), 3, balance=[1, 1, 1, 1])
    x, y = torch.randn(6, 8), torch.randn(6)
    with torch.inference_mode():
        expected = pipe(x)
        assert torch.equal(pipe(x + 0), expected)
    loss, output = way.run(pipe, x, y)
    assert torch.equal(output, expected)
    loss.backward()


def pipe_in_a_checkpoint(reentrant: bool, module: nn.Sequential, **options: Any) -> tuple[Pipe, torch.Tensor]:
    pipe = Pipe(module, 2, balance=[2, 2], devices=["cpu"] * 2, **options)
    x = torch.linspace(-1, 1, 32).reshape(4, 8).requires_grad_()
    torch.manual_seed(0)
    torch_checkpoint.checkpoint(pipe, x, use_reentrant=reentrant).square().sum().backward()
    return pipe, x


def dropping() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(Block(), nn.Dropout(0.5), Block(), nn.Linear(8, 2))


@pytest.mark.one_process("without a target a pipe of several processes gives outputs to one of them")
def test_a_pipe_in_a_reentrant_checkpoint() -> None:
    pipe, x = pipe_in_a_checkpoint(True, dropping())
    alone, other = Pipe(dropping(), 2, balance=[2, 2], devices=["cpu"] * 2), x.detach().clone().requires_grad_()
    torch.manual_seed(0)
    alone(other).square().sum().backward()
    assert torch.equal(x.grad, other.grad)
    assert all(map(torch.equal, gradients(pipe), gradients(alone)))


@pytest.mark.one_process("without a target a pipe of several processes gives outputs to one of them")
def test_a_pipe_in_a_checkpoint_with_hooks_is_refused() -> None:
    calls: list[int] = []
    module = dropping()
    module[0].register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(RuntimeError, match=r"inside of torch.utils.checkpoint.*a pipe recomputes by itself, as Pipe\("):
        pipe_in_a_checkpoint(False, module)
    assert not calls
    # Nothing is saved for a backward here, so that no hook runs.
    frozen = Pipe(module.requires_grad_(False), 2, balance=[2, 2], devices=["cpu"] * 2)
    weight = torch.ones(2, requires_grad=True)
    torch_checkpoint.checkpoint(lambda: frozen(torch.ones(4, 8)) * weight, use_reentrant=False).sum().backward()
    assert weight.grad is not None
