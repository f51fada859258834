"""What is left of a traceback."""

import traceback

import pytest
import torch
from torch import nn

from pipework import Pipe
from pipework.distributed.health.tracebacks import outer_part, shortened


class Odd(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return root_of(x)


def root_of(x: torch.Tensor) -> torch.Tensor:
    try:
        return {}[len(x)]  # type: ignore[no-any-return]
    except KeyError as cause:
        raise ValueError("no root") from cause


def error_of_a_layer() -> ValueError:
    with pytest.raises(ValueError, match="no root") as caught:
        Pipe(nn.Sequential(nn.Identity(), Odd()), balance=[1, 1], devices=["cpu", "cpu"])(torch.zeros(2, 1))
    return caught.value


def functions_in(text: str) -> list[str]:
    return [line.rsplit(" in ", 1)[1] for line in text.splitlines() if line.lstrip().startswith("File ")]


def test_the_users_frames_and_all_errors_stay() -> None:
    error = error_of_a_layer()
    text = shortened(error)
    assert functions_in(text) == ["root_of", "error_of_a_layer", "forward", "root_of"]
    assert "KeyError: 2" in text
    assert "the direct cause" in text
    assert text.endswith(
        "ValueError: no root\npipework: in layer '1' (Odd)\npipework: stage 1, micro-batch 0, action F\n"
    )
    assert len(functions_in("".join(traceback.format_exception(error)))) > 10  # nothing was changed


def test_where_it_was_raised_stays() -> None:
    with pytest.raises(TypeError, match="do not have any tensors") as caught:
        Pipe(nn.Sequential(nn.Identity()))(None)
    assert functions_in(shortened(caught.value)) == ["test_where_it_was_raised_stays", "_common_rows"]


def test_in_groups() -> None:
    group = ExceptionGroup("both", [error_of_a_layer(), KeyError(3)])
    assert "stage_run.py" not in shortened(group)
    assert "KeyError: 3" in shortened(group)


def test_of_a_traceback_the_outer_frames_stay() -> None:
    error = error_of_a_layer()
    outer = outer_part(error.__traceback__)
    assert [frame.name for frame in traceback.extract_tb(outer)] == ["error_of_a_layer", "forward", "root_of"]
    assert len(traceback.extract_tb(error.__traceback__)) > 10
    assert outer_part(None) is None
