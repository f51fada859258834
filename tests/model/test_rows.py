import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from pipework import MicroBatches, Pipe, PipeWarning
from pipework.model.rows import modules_with_batch_second


class Output(nn.Module):
    """The first of the two values that a recurrent module returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class Transposing(Output):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


class Attend(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(query=x, key=x, value=x)[0]


def encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 8, 0.0, **options)


SECOND = {
    "LSTM": lambda: Output(nn.LSTM(8, 8)),
    "GRU": lambda: Output(nn.GRU(8, 8)),
    "RNN": lambda: Output(nn.RNN(8, 8)),
    "MultiheadAttention": Attend,
    "TransformerEncoderLayer": encoder,
    "TransformerEncoder": lambda: nn.TransformerEncoder(encoder(), 1, enable_nested_tensor=False),
}
FIRST = {
    "LSTM": lambda: Output(nn.LSTM(8, 8, batch_first=True)),
    "transposing": lambda: Transposing(nn.LSTM(8, 8)),
    "MultiheadAttention": lambda: Attend(batch_first=True),
    "TransformerEncoderLayer": lambda: encoder(batch_first=True),
}


def pipe_of(layer: nn.Module, chunks: int = 4, **options: Any) -> Pipe:
    module = nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 8))
    return Pipe(module, chunks, balance=[1, 2], devices=["cpu", "cpu"], **options)


def hooks(pipe: Pipe) -> int:
    return sum(len(module._forward_pre_hooks) for module in pipe.modules())


@pytest.mark.parametrize("kind", SECOND)
@pytest.mark.parametrize("training", [True, False])
def test_rows_that_would_influence_each_other(kind: str, training: bool) -> None:
    pipe = pipe_of(SECOND[kind]()).train(training)
    with pytest.warns(PipeWarning, match=r"of layer '1' .*shape \(3, 5, 8\).*batch_first=True.*\[B, T, D\]"):
        pipe(torch.randn(12, 5, 8))
    assert not hooks(pipe)
    pipe(torch.randn(12, 5, 8))


def test_an_input_with_time_first() -> None:
    with pytest.warns(PipeWarning, match=r"\(3, 10, 8\)\. It takes dimension 1 for the batch, but the 3 rows"):
        pipe_of(Output(nn.LSTM(8, 8)))(torch.randn(12, 10, 8))


@pytest.mark.parametrize("kind", FIRST)
def test_rows_that_do_not(kind: str) -> None:
    pipe, x = pipe_of(FIRST[kind]()), torch.randn(12, 10, 8)
    output = pipe(x)
    assert not hooks(pipe)
    torch.testing.assert_close(output, nn.Sequential(*pipe)(x))


@pytest.mark.parametrize("shape", [(12, 6, 8), (12, 3, 8), (4, 7, 8), (9, 4, 8)])
def test_what_cannot_be_told_is_asked_once(shape: tuple[int, ...]) -> None:
    pipe = pipe_of(Output(nn.LSTM(8, 8)))
    with pytest.warns(PipeWarning, match=r"'inner' \(LSTM\) of layer '1' \(Output\).*Compare pipe\(x\)") as seen:
        pipe(torch.randn(*shape))
    assert len(seen) == 1
    assert seen[0].filename == __file__
    pipe(torch.randn(*shape))  # warnings are errors
    assert not hooks(pipe)


def test_one_sequence_without_a_batch() -> None:
    with pytest.warns(PipeWarning, match=r"\(3, 8\): two dimensions are one sequence.*give it three dimensions"):
        pipe_of(Output(nn.LSTM(8, 8)))(torch.randn(12, 8))


def test_a_mini_batch_that_is_not_cut_shows_nothing() -> None:
    pipe = pipe_of(Output(nn.LSTM(8, 8)))
    pipe(torch.randn(1, 5, 8))
    pipe(MicroBatches([torch.randn(3, 5, 8), torch.randn(2, 5, 8)]))
    with pytest.warns(PipeWarning, match="batch_first"):
        pipe(torch.randn(12, 5, 8))


def test_with_the_loss_inside() -> None:
    pipe, x = pipe_of(Output(nn.LSTM(8, 8)), schedule="1f1b", loss_fn=functional.mse_loss), torch.randn(12, 5, 8)
    with pytest.warns(PipeWarning, match="batch_first"):
        pipe(x, target=x)
    pipe[1].inner.batch_first = True
    pipe(x, target=x).backward()


def test_hooks_come_and_go_while_no_thread_runs_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[bool] = []
    remove = RemovableHandle.remove

    class Noted(nn.LSTM):
        def register_forward_pre_hook(self, *args: Any, **options: Any) -> RemovableHandle:
            held.append(pipe._executor.engine_in_use().lock.locked())
            return super().register_forward_pre_hook(*args, **options)

    def removed(handle: RemovableHandle) -> None:
        held.append(pipe._executor.engine_in_use().lock.locked())
        remove(handle)

    monkeypatch.setattr(RemovableHandle, "remove", removed)
    pipe = pipe_of(Transposing(Noted(8, 8)))
    pipe(torch.randn(12, 10, 8))
    assert held == [True, True]


def test_a_warning_that_is_an_error_comes_after_the_step() -> None:
    module = nn.Sequential(nn.BatchNorm1d(5), Output(nn.LSTM(8, 8)), nn.Linear(8, 8))
    pipe = Pipe(module, 4, deferred_batch_norm=True, balance=[1, 2], devices=["cpu", "cpu"])
    with pytest.raises(PipeWarning, match="batch_first"):
        pipe(torch.randn(12, 5, 8))
    assert module[0].num_batches_tracked == 1
    pipe(torch.randn(12, 5, 8))
    assert module[0].num_batches_tracked == 2


def test_a_layer_that_is_replaced_is_seen() -> None:
    pipe = pipe_of(nn.Tanh())
    pipe(torch.randn(12, 5, 8))
    setattr(pipe, "1", Output(nn.LSTM(8, 8)))
    with pytest.warns(PipeWarning, match="batch_first"):
        pipe(torch.randn(12, 5, 8))


def test_compiled_layers_get_no_hooks() -> None:
    compiled = Output(nn.LSTM(8, 8))
    compiled.inner.compile(backend="eager")
    assert not modules_with_batch_second([("0", compiled), ("1", torch.jit.script(nn.LSTM(8, 8)))])


def test_a_warning_can_be_ignored() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=PipeWarning)
        pipe_of(encoder())(torch.randn(8, 6, 8))
