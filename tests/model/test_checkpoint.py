import pytest
import torch
from torch import nn

from pipework import Pipe
from pipework.model.checkpoint import is_checkpointing, is_recomputing


class Look(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen: list[tuple[int, bool, bool]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((int(x.detach()[0, 0]), is_checkpointing(), is_recomputing()))
        return x * self.weight


FIRST, AGAIN, ONLY = (True, False), (False, True), (False, False)


@pytest.mark.parametrize(
    ("mode", "rows", "expected"),
    [
        ("never", 3, [(0, *ONLY), (1, *ONLY), (2, *ONLY)]),
        ("except_last", 3, [(0, *FIRST), (1, *FIRST), (2, *ONLY), (0, *AGAIN), (1, *AGAIN)]),
        ("always", 3, [(0, *FIRST), (1, *FIRST), (2, *FIRST), (0, *AGAIN), (1, *AGAIN), (2, *AGAIN)]),
        # The actual number of micro-batches counts, not the requested one.
        ("except_last", 1, [(0, *ONLY)]),
        ("except_last", 2, [(0, *FIRST), (1, *ONLY), (0, *AGAIN)]),
    ],
)
def test_which_micro_batches_are_computed_twice(mode: str, rows: int, expected: list[tuple[int, bool, bool]]) -> None:
    pipe = Pipe(nn.Sequential(Look(), Look()), 3, mode, balance=[1, 1], devices=["cpu"] * 2)
    pipe(torch.arange(float(rows))[:, None]).sum().backward()
    assert [layer.seen for layer in pipe] == [expected, expected]
    assert (is_checkpointing(), is_recomputing()) == ONLY


def test_nothing_is_checkpointed_without_a_graph_or_in_evaluation() -> None:
    pipe = Pipe(nn.Sequential(Look(), Look()), 2, "always", balance=[1, 1], devices=["cpu"] * 2)
    with torch.no_grad():
        pipe(torch.ones(2, 1))
    pipe.eval()(torch.ones(2, 1)).sum().backward()
    assert [[state[1:] for state in layer.seen] for layer in pipe] == [[ONLY] * 4] * 2


def test_a_stage_is_recomputed_while_any_of_its_layers_trains() -> None:
    pipe = Pipe(nn.Sequential(Look(), Look()), 1, "always", balance=[2], devices=["cpu"])
    for evaluated, seen in ((0, [FIRST, AGAIN]), (1, [ONLY])):
        pipe[0].seen.clear()
        pipe[evaluated].eval()
        pipe(torch.ones(2, 1)).sum().backward()
        assert [state[1:] for state in pipe[0].seen] == seen


@pytest.mark.parametrize("fail_in", [FIRST, AGAIN])
def test_the_flags_are_reset_after_a_failure(fail_in: tuple[bool, bool]) -> None:
    class Fail(Look):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if (is_checkpointing(), is_recomputing()) == fail_in:
                raise ArithmeticError
            return super().forward(x)

    pipe = Pipe(nn.Sequential(Fail()), 2, "always", balance=[1])
    with pytest.raises(ArithmeticError):
        pipe(torch.ones(2, 1)).sum().backward()
    with torch.no_grad():
        pipe(torch.zeros(2, 1))
    assert pipe[0].seen[-1][1:] == ONLY
