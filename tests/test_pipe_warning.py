import pytest
from torch import nn

from pipework import Pipe, PipeWarning
from pipework.pipe_warning import warn_caller


class Wrapped(Pipe):
    def __init__(self, module: nn.Sequential) -> None:
        super().__init__(module, chunks=2, balance=[2], devices=["cpu"] * 2)  # the caller


def test_the_line_is_the_callers() -> None:
    with pytest.warns(PipeWarning, match="^two words$") as seen:
        warn_caller("two words")
    with pytest.warns(PipeWarning, match="2 devices for 1 worker") as of_pipe:
        Wrapped(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert [each.filename for each in (*seen, *of_pipe)] == [__file__] * 2
    assert of_pipe[0].lineno == Wrapped.__init__.__code__.co_firstlineno + 1
