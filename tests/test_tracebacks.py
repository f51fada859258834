"""What is left of a traceback."""

import traceback
from typing import Any

import pytest
import torch
from torch import nn

from pipework import Pipe, PipeWarning
from pipework.tracebacks import VARIABLE, shortened, warn_caller


class Odd(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return root_of(x)


def root_of(x: torch.Tensor) -> torch.Tensor:
    try:
        return {}[len(x)]  # type: ignore[no-any-return]
    except KeyError as cause:
        raise ValueError("no root") from cause


def pipe_of(layer: nn.Module, **options: Any) -> Pipe:
    return Pipe(nn.Sequential(nn.Identity(), layer), balance=[1, 1], devices=["cpu", "cpu"], **options)


def error_of_a_layer() -> ValueError:
    with pytest.raises(ValueError, match="no root") as caught:
        pipe_of(Odd())(torch.zeros(2, 1))
    return caught.value


@pytest.fixture
def whole_error(monkeypatch: pytest.MonkeyPatch) -> ValueError:
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, "1")
        return error_of_a_layer()


def functions_in(text: str) -> list[str]:
    return [line.rsplit(" in ", 1)[1] for line in text.splitlines() if line.lstrip().startswith("File ")]


CALL = ["_wrapped_call_impl", "_call_impl", "forward"]  # of the pipe


def names_in(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_what_is_refused_when_a_pipe_is_made_has_two_frames() -> None:
    with pytest.raises(ValueError, match="balance must be") as caught:
        Pipe(nn.Sequential(nn.Identity()), balance=[2], devices=["cpu"])
    assert names_in(caught.value)[1:] == ["__init__", "checked_balance"]


@pytest.mark.parametrize("options", [{}, {"loss_fn": nn.functional.mse_loss}], ids=["outside", "inside"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_what_a_thread_raises_has_the_users_frames_and_the_call(checkpoint: str, options: dict[str, Any]) -> None:
    target = {"target": torch.zeros(2, 1)} if options else {}
    with pytest.raises(ValueError, match="no root") as caught:
        pipe_of(nn.Sequential(Odd()), checkpoint=checkpoint, **options)(torch.zeros(2, 1), **target)
    assert names_in(caught.value)[1:] == [*CALL, "forward", "forward", "root_of"]


class FailsInBackward(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        y.register_hook(lambda gradient: root_of(gradient[:0]))
        return y


def test_so_has_what_it_raises_in_a_backward() -> None:
    x = torch.zeros(2, 1, requires_grad=True)
    loss = pipe_of(FailsInBackward())(x).sum()
    with pytest.raises(ValueError, match="no root") as caught:
        loss.backward()
    assert names_in(caught.value)[-4:] == ["apply", "backward", "<lambda>", "root_of"]  # PyTorch's, and the pipe's node


def test_a_variable_leaves_all_frames(whole_error: ValueError, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(names_in(whole_error)) > 15
    monkeypatch.setenv(VARIABLE, "1")
    assert "stage_forward.py" in shortened(whole_error)
    monkeypatch.setenv(VARIABLE, "0")
    assert "stage_forward.py" not in shortened(whole_error)
    assert len(names_in(error_of_a_layer())) < 8


def test_the_users_frames_and_all_errors_stay(whole_error: ValueError) -> None:
    text = shortened(whole_error)
    assert functions_in(text) == ["root_of", "error_of_a_layer", "forward", "root_of"]
    assert "KeyError: 2" in text
    assert "the direct cause" in text
    assert text.endswith(
        "ValueError: no root\npipework: in layer '1' (Odd)\npipework: stage 1, micro-batch 0, action F\n"
    )


def test_where_it_was_raised_stays() -> None:
    with pytest.raises(TypeError, match="do not have any tensors") as caught:
        Pipe(nn.Sequential(nn.Identity()), balance=[1])(None)
    assert functions_in(shortened(caught.value)) == ["test_where_it_was_raised_stays", "of_inputs"]


class Wrapped(Pipe):
    def __init__(self, module: nn.Sequential) -> None:
        super().__init__(module, chunks=1, balance=[1, 1], devices=["cpu"] * 2)  # the caller


def test_the_line_is_the_callers() -> None:
    with pytest.warns(PipeWarning, match="^two words$") as seen:
        warn_caller("two words")
    with pytest.warns(PipeWarning, match="chunks is 1, so 2 workers wait") as of_pipe:
        Wrapped(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert [each.filename for each in (*seen, *of_pipe)] == [__file__] * 2
    assert of_pipe[0].lineno == Wrapped.__init__.__code__.co_firstlineno + 1
