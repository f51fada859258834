import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from pipework import MicroBatches, Pipe, PipeWarning
from pipework.model.row_warnings import modules_with_batch_second


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


SECOND: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: Output(nn.LSTM(8, 8)),
    "GRU": lambda: Output(nn.GRU(8, 8)),
    "MultiheadAttention": Attend,
    "TransformerEncoder": lambda: nn.TransformerEncoder(encoder(), 1, enable_nested_tensor=False),
}
FIRST: dict[str, Callable[[], nn.Module]] = {
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
def test_rows_that_would_influence_each_other(kind: str) -> None:
    pipe = pipe_of(SECOND[kind]()).train(kind != "GRU")
    with pytest.warns(
        PipeWarning,
        match=r"of layer '1' .*shape \(3, 5, 8\).*takes dimension 1 for the batch.*batch_first=True.*\[B, T, D\]",
    ):
        pipe(torch.randn(12, 5, 8))
    assert not hooks(pipe)
    pipe(torch.randn(12, 5, 8))


@pytest.mark.parametrize("kind", FIRST)
def test_rows_that_do_not(kind: str) -> None:
    pipe, x = pipe_of(FIRST[kind]()), torch.randn(12, 10, 8)
    output = pipe(x)
    assert not hooks(pipe)
    torch.testing.assert_close(output, nn.Sequential(*pipe)(x))


@pytest.mark.parametrize("shape", [(12, 8), (12, 3, 8), (9, 4, 8)])
def test_mini_batches_that_are_cut_are_warned_of_once(shape: tuple[int, ...]) -> None:
    pipe = pipe_of(Output(nn.LSTM(8, 8)))
    pipe(torch.randn(1, 5, 8))
    pipe(MicroBatches([torch.randn(3, 5, 8), torch.randn(2, 5, 8)]))
    with pytest.warns(PipeWarning, match=r"'inner' \(LSTM\) of layer '1' \(Output\).*If pipe\(x\) equals") as seen:
        pipe(torch.randn(*shape))
    assert [each.filename for each in seen] == [__file__]
    pipe(torch.randn(*shape))  # warnings are errors
    assert not hooks(pipe)


class Rows(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x[:, None])[0][:, 0]


def test_two_dimensions_are_one_sequence_also_with_the_batch_first() -> None:
    pipe_of(Rows(8, 8, batch_first=True))(torch.randn(12, 8))  # without a warning
    pipe = pipe_of(Output(nn.LSTM(8, 8, batch_first=True)))
    with pytest.warns(PipeWarning, match=r"made with batch_first=True .* two dimensions for one sequence"):
        pipe(torch.randn(12, 8))


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


def test_compiled_layers_get_no_hooks() -> None:
    compiled = Output(nn.LSTM(8, 8))
    compiled.inner.compile(backend="eager")
    assert not modules_with_batch_second([("0", compiled), ("1", torch.jit.script(nn.LSTM(8, 8)))])


class Last(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def pipe_with(function: Callable[[Tensor], Any], chunks: int = 4, **options: Any) -> Pipe:
    return Pipe(nn.Sequential(nn.Linear(8, 8), Last(function)), chunks, balance=[1, 1], devices=["cpu"] * 2, **options)


@pytest.mark.parametrize(
    ("function", "rows", "shape"),
    [
        (lambda x: x.mean(0, keepdim=True), 16, r"\(1, 8\)"),
        (lambda x: x[:, :6].mean(0), 16, r"\(6,\)"),
        (lambda x: x.mean(0), 14, r"\(8,\)"),  # 8 numbers, for 4 rows and for 3
        (lambda x: x.new_zeros(3, 5), 16, r"\(3, 5\)"),
    ],
)
def test_sizes_that_do_not_come_from_the_rows(function: Callable[[Tensor], Any], rows: int, shape: str) -> None:
    pipe, x = pipe_with(function).eval(), torch.randn(rows, 8)
    message = f"the output has the shape {shape} for each of 4 micro-batches, the first of which has 4 .* joins along"
    with pytest.warns(PipeWarning, match=message) as seen:
        pipe(x)
    assert [each.filename for each in seen] == [__file__]
    pipe(x)  # warnings are errors


def test_names_the_tensor_and_looks_at_the_first_outputs_of_a_pipe_with_a_loss() -> None:
    pipe = pipe_with(
        lambda x: {"rows": x, "pooled": x.sum(0, keepdim=True)},
        schedule="1f1b",
        loss_fn=lambda output, target: functional.mse_loss(output["rows"], target),
    )
    x = torch.randn(16, 8)
    pipe(x, target=x).backward()
    for each in (pipe, copy.deepcopy(pipe)):
        with pytest.warns(PipeWarning, match=r"^output tensor 1 has the shape \(1, 8\)"):
            each(x, target=x, return_output=True)


RIGHT = {
    "rows": lambda x: x,
    "flattened": lambda x: x.view(-1, 2),
    "pairs": lambda x: x.view(-1, 2, 8).mean(1),
    "a mean": lambda x: x.mean(),
    "selected": lambda x: x[x[:, 0] > 0],
    "nothing": lambda x: x[:0],
    "a mask for all": lambda x: (x, len(x), None),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs(name: str) -> None:
    for rows in (16,) if name == "pairs" else (16, 1, 4):
        x = torch.randn(rows, 8)
        x[:, 0] = 1.0
        x[:3] = -x[:3]
        pipe_with(RIGHT[name])(x)


def test_uneven_micro_batches_and_those_of_the_caller() -> None:
    pipe_with(lambda x: x.repeat_interleave(3, 0))(torch.randn(9, 8))
    pipe_with(lambda x: x.mean(0, keepdim=True))(MicroBatches([torch.randn(4, 8), torch.randn(4, 8)]))
    pipe_with(lambda x: x.mean(0, keepdim=True), chunks=1, schedule="gpipe").eval()(torch.randn(4, 8))


def test_a_size_that_fits_by_chance_is_seen_when_the_rows_change() -> None:
    pipe = pipe_with(lambda x: x.mean(0))  # 8 numbers, which could be two for each of 4 rows
    pipe(torch.randn(16, 8))
    with pytest.warns(PipeWarning, match=r"the output has the shape \(8,\) for each of 4 .* first of which has 2 rows"):
        pipe(torch.randn(8, 8))
    pipe(torch.randn(32, 8))


def test_training_with_one_row_each_is_not_pipelined() -> None:
    pipe, x = pipe_of(nn.Linear(8, 8)), torch.randn(1, 8)
    pipe(x)  # may be a trial
    with torch.no_grad():
        pipe(x)
    with pytest.warns(PipeWarning, match=r"has one row, .*chunks=4: .*nothing is pipelined.*split= or MicroBatches"):
        pipe(x)
    pipe(x)
    other = pipe_of(nn.Linear(8, 8))
    for rows in (8, 1, 1, 1):  # the last of an epoch
        other(torch.randn(rows, 8))
