"""The pipe beside the rest of PyTorch: compiled layers, scalers, hooks, parametrizations, autocast, other modes."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import checkpoint as torch_checkpoint

from pipework import Pipe
from pipework.testing import reference_backward

CHECKPOINT_MODES = ("never", "except_last", "always")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def in_two(module: nn.Sequential, checkpoint: str = "except_last", chunks: int = 3) -> Pipe:
    half = len(module) // 2
    return Pipe(module, chunks, checkpoint, balance=[half, len(module) - half], devices=["cpu"] * 2)


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_compiled_layers(checkpoint: str, backend: str) -> None:
    torch._dynamo.reset()
    plain = nn.Sequential(*(Block() for _ in range(4)))
    for layer in plain:
        layer.compile(backend=backend)
    piped = nn.Sequential(*(copy.deepcopy(layer) for layer in plain))
    for layer in piped:
        layer.compile(backend=backend)
    pipe = in_two(piped, checkpoint)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, pipe)]
    for _ in range(3):
        x = torch.randn(6, 8)
        for model in (plain, pipe):
            model(x).square().mean().backward()
        for expected, actual in zip(gradients(plain), gradients(pipe), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


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


def test_grad_scaler_scales_and_skips_an_overflow() -> None:
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    pipe = in_two(copy.deepcopy(plain), "never")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    x = torch.randn(6, 8)
    scaler.scale(pipe(x).sum()).backward()
    scaler.unscale_(optimizer)
    plain(x).sum().backward()
    for expected, actual in zip(gradients(plain), gradients(pipe), strict=True):
        torch.testing.assert_close(actual, expected)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    before = copy.deepcopy(pipe.state_dict())
    (scaler.scale(pipe(x).sum()) * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(map(torch.equal, before.values(), pipe.state_dict().values()))
    assert scaler.get_scale() < 2.0**10


def test_save_on_cpu_and_other_saved_tensor_hooks() -> None:
    pipe = in_two(nn.Sequential(*(Block() for _ in range(4))), "never")
    x = torch.randn(6, 8)
    pipe(x).sum().backward()
    expected = gradients(pipe)
    pipe.zero_grad()
    with torch.autograd.graph.save_on_cpu():
        loss = pipe(x).sum()
    loss.backward()
    assert all(map(torch.equal, gradients(pipe), expected))


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_parametrized_modules(checkpoint: str) -> None:
    def module() -> nn.Sequential:
        torch.manual_seed(0)
        weight_normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        return nn.Sequential(weight_normed, nn.Tanh(), spectral, nn.Linear(8, 1))

    plain, pipe = module().double(), in_two(module().double(), checkpoint)
    x = torch.randn(6, 8, dtype=torch.float64)
    torch.cat([plain(part) for part in x.tensor_split(3)]).sum().backward()
    pipe(x).sum().backward()
    for expected, actual in zip(gradients(plain), gradients(pipe), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-13)
    assert all(map(torch.equal, plain.buffers(), pipe.buffers()))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_pytorchs_own_checkpoint_inside_a_layer(use_reentrant: bool) -> None:
    class Checkpointed(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch_checkpoint.checkpoint(super().forward, x, use_reentrant=use_reentrant)

    plain = nn.Sequential(*(Checkpointed() for _ in range(4)))
    pipe = in_two(copy.deepcopy(plain), "never")
    x = torch.randn(6, 8, requires_grad=True)
    reference_backward(plain, x, torch.sum, 3, key=0)
    pipe(x).sum().backward()
    assert all(map(torch.equal, gradients(plain), gradients(pipe)))


def test_module_hooks_see_every_micro_batch() -> None:
    seen: list[tuple[str, tuple[int, ...]]] = []
    module = nn.Sequential(*(Block() for _ in range(4)))
    module[1].register_forward_hook(lambda m, i, o: seen.append(("forward", tuple(o.shape))))
    module[2].linear.register_full_backward_hook(lambda m, i, o: seen.append(("backward", tuple(o[0].shape))))
    in_two(module, "never")(torch.randn(6, 8)).sum().backward()
    assert seen == [("forward", (2, 8))] * 3 + [("backward", (2, 8))] * 3


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


def test_two_pipes_may_share_layers() -> None:
    module = nn.Sequential(*(Block() for _ in range(4)))
    first, second = in_two(module), in_two(module)
    x = torch.randn(6, 8)
    (first(x).sum() + second(x).sum()).backward()
    twice = [gradient.clone() for gradient in gradients(module)]
    module.zero_grad()
    first(x).sum().backward()
    for gradient, whole in zip(gradients(module), twice, strict=True):
        torch.testing.assert_close(whole, 2 * gradient)


def test_inference_mode_between_training_steps() -> None:
    pipe = in_two(nn.Sequential(*(Block() for _ in range(4))))
    x = torch.randn(6, 8)
    with torch.inference_mode():
        expected = pipe(x)
        assert torch.equal(pipe(x + 0), expected)
    output = pipe(x)
    assert torch.equal(output, expected)
    output.sum().backward()


def test_attention_of_pytorch() -> None:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.attention(x, x, x, need_weights=False)[0]

    plain = nn.Sequential(Attend(), Attend(), nn.Linear(8, 8), Attend())
    pipe = in_two(copy.deepcopy(plain), "always")
    x, y = torch.randn(6, 5, 8), torch.randn(6, 5, 8)
    reference_backward(plain, x, lambda output: F.mse_loss(output, y), 3, key=0)
    F.mse_loss(pipe(x), y).backward()
    assert all(map(torch.equal, gradients(plain), gradients(pipe)))
