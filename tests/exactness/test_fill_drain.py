"""A pipe computes what the un-pipelined model computes, bit by bit: loss, output, every gradient and buffer."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipework import Pipe
from pipework.testing import draw_key, reference_backward

CHECKPOINT_MODES = ("never", "except_last", "always")
WIDTH = 16


class Mix(nn.Module):
    """Draws in three ways and keeps a residual branch, so that gradients are summed inside the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(x) * 0.1
        kept = torch.bernoulli(torch.full_like(x, 0.8))
        return x + F.dropout(torch.tanh(self.linear(x + noise)), 0.2, self.training) * kept * self.gain


def transformer() -> nn.Sequential:
    def block() -> nn.Module:
        return nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True, norm_first=True)

    return nn.Sequential(nn.Linear(WIDTH, WIDTH), block(), block(), nn.Dropout(0.2), nn.Linear(WIDTH, 5))


def drawing() -> nn.Sequential:
    return nn.Sequential(Mix(), nn.Dropout(0.5), Mix(), nn.LayerNorm(WIDTH), Mix())


def recurrent() -> nn.Sequential:
    class Outputs(nn.Module):
        def forward(self, outputs: torch.Tensor, state: object) -> torch.Tensor:
            return outputs

    return nn.Sequential(
        nn.LSTM(WIDTH, WIDTH, 2, dropout=0.3, batch_first=True), Outputs(), nn.Linear(WIDTH, WIDTH), Mix(), nn.Tanh()
    )


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv1d(4, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Dropout1d(0.3),
        nn.ReLU(inplace=True),
        nn.Conv1d(8, 4, 3),
    )


MODELS = {"transformer": transformer, "drawing": drawing, "recurrent": recurrent, "convolutional": convolutional}
BALANCES = {1: [5], 2: [2, 3], 3: [1, 2, 2], 4: [1, 1, 1, 2]}


def unpipelined(name: str, model: nn.Sequential) -> nn.Sequential:
    """nn.Sequential hands a tuple over as one argument, so the recurrent reference needs it spread."""
    if name != "recurrent":
        return model

    class Spread(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self:
                x = layer(*x) if isinstance(x, tuple) else layer(x)
            return x

    return Spread(*model)


def batch(rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, 4, WIDTH).to(dtype)


@pytest.mark.parametrize("rows", [8, 7, 2], ids=["even", "ragged", "fewer-than-chunks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("name", MODELS)
def test_three_optimizer_steps_are_bitwise_equal(
    name: str, checkpoint: str, stages: int, dtype: torch.dtype, rows: int
) -> None:
    plain = unpipelined(name, MODELS[name]().to(dtype))
    piped = copy.deepcopy(plain)
    pipe = Pipe(nn.Sequential(*piped), 4, checkpoint, balance=BALANCES[stages], devices=["cpu"] * stages)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (plain, pipe)]
    for step in range(3):
        x = batch(rows, dtype)
        torch.manual_seed(step)
        key = draw_key()
        reference = reference_backward(plain, x, lambda y: y.float().square().mean(), 4, key)
        torch.manual_seed(step)
        output = pipe(x)
        loss = output.float().square().mean()
        loss.backward()
        assert torch.equal(output, reference.output)
        assert torch.equal(loss, reference.loss)
        for (parameter_name, expected), actual in zip(plain.named_parameters(), pipe.parameters(), strict=True):
            assert torch.equal(expected.grad, actual.grad), f"gradient of {parameter_name} in step {step}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, plain.state_dict().values(), pipe.state_dict().values()))


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_accumulated_mini_batches_are_bitwise_equal(checkpoint: str) -> None:
    plain = drawing()
    pipe = Pipe(copy.deepcopy(plain), 3, checkpoint, balance=[2, 3], devices=["cpu"] * 2)
    for step, rows in enumerate((6, 5)):
        x = torch.randn(rows, WIDTH)
        torch.manual_seed(step)
        key = draw_key()
        reference_backward(plain, x, torch.sum, 3, key)
        torch.manual_seed(step)
        pipe(x).sum().backward()
    for expected, actual in zip(plain.parameters(), pipe.parameters(), strict=True):
        assert torch.equal(expected.grad, actual.grad)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("factor", [2.0, 0.5, 1024.0])
def test_loss_scale_by_a_power_of_two_is_bitwise(checkpoint: str, factor: float) -> None:
    plain = transformer()
    pipe = Pipe(copy.deepcopy(plain), 3, checkpoint, balance=[2, 3], devices=["cpu"] * 2)
    x = torch.randn(6, 4, WIDTH)
    torch.manual_seed(3)
    key = draw_key()
    reference_backward(plain, x, torch.sum, 3, key)
    torch.manual_seed(3)
    (pipe(x).sum() * factor).backward()
    for expected, actual in zip(plain.parameters(), pipe.parameters(), strict=True):
        assert torch.equal(expected.grad * factor, actual.grad)


@pytest.mark.parametrize("requires_leaf", [True, False], ids=["leaf", "non-leaf"])
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_input_gradient_is_bitwise_equal(checkpoint: str, requires_leaf: bool) -> None:
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    pipe = Pipe(copy.deepcopy(plain), 3, checkpoint, balance=[1, 2], devices=["cpu"] * 2)
    leaf = torch.randn(7, WIDTH, requires_grad=True)
    factor = 1 if requires_leaf else 2
    own = (leaf * factor).detach().requires_grad_()
    reference_backward(plain, own, torch.sum, 3, key=0)
    pipe(leaf if requires_leaf else leaf * factor).sum().backward()
    assert torch.equal(own.grad * factor, leaf.grad)


@pytest.mark.parametrize("stages", [2, 4])
def test_gradients_are_those_of_the_whole_batch(stages: int) -> None:
    plain = transformer().double().eval()
    pipe = Pipe(copy.deepcopy(plain), 4, balance=BALANCES[stages], devices=["cpu"] * stages)
    x = torch.randn(10, 4, WIDTH, dtype=torch.float64)
    plain(x).square().mean().backward()
    pipe(x).square().mean().backward()
    for expected, actual in zip(plain.parameters(), pipe.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-12, atol=1e-15)


def test_evaluation_between_steps_changes_nothing() -> None:
    def train(evaluate: bool) -> list[torch.Tensor]:
        torch.manual_seed(5)
        pipe = Pipe(drawing(), 2, balance=[3, 2], devices=["cpu"] * 2)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        data = torch.randn(3, 4, WIDTH)
        for x in data:
            pipe(x).square().mean().backward()
            if evaluate:
                # Only modules that draw in evaluation mode too may touch the caller's generator; these layers do, so
                # it is kept by hand.
                state = torch.get_rng_state()
                pipe.eval()
                with torch.no_grad():
                    pipe(x)
                pipe.train()
                torch.set_rng_state(state)
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach() for parameter in pipe.parameters()]

    assert all(map(torch.equal, train(evaluate=False), train(evaluate=True)))


def test_two_runs_with_one_seed_end_alike() -> None:
    def train() -> list[torch.Tensor]:
        torch.manual_seed(7)
        pipe = Pipe(drawing(), 4, balance=[2, 3], devices=["cpu"] * 2)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for _ in range(20):
            pipe(torch.randn(8, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach() for parameter in pipe.parameters()]

    assert all(map(torch.equal, train(), train()))
