from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework.model.marks import MIXED, MicroBatches
from pipework.model.parts.cut import Cuttable
from pipework.model.parts.outputs import joined, output_dims
from pipework.model.row_dimensions import Layout
from tests.model.parts.models import WIDTH


class Net(nn.Module):
    """Returns what a function makes of the output of its last layer, which has the shape [rows, 3, WIDTH]."""

    def __init__(self, last: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.norm = nn.BatchNorm1d(3)
        self.last = [last]

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.last[0](self, x)


# From what the model returns to the dimension of the rows of each tensor in it.
RETURNED: dict[str, tuple[Callable[[Any, Tensor], Any], dict[str, int]]] = {
    "one tensor": (lambda net, x: x, {"output": 0}),
    "rows second": (lambda net, x: {"x": x.transpose(0, 1)}, {"output['x']": 1}),
    "flat": (lambda net, x: [x.flatten(0, 1)], {"output[0]": 0}),
    "a number": (lambda net, x: (x.mean(), x), {"output[0]": 0, "output[1]": 0}),
    "a mean over rows": (lambda net, x: x.mean(0), {"output": MIXED}),
    "similarities": (lambda net, x: (x[:, 0] @ x[:, 0].T, None), {"output[0]": MIXED}),
    "pairs": (lambda net, x: (x[:, 0] @ x[:, 0].T).flatten(), {"output": MIXED}),
    "an entry for each row": (lambda net, x: [*x], {"output[0]": MIXED, "output[1]": MIXED}),
    "in one mode": (lambda net, x: {"more": x, "x": x} if net.training else x, {"output['more']": 0, "output": 0}),
    "not with one row": (lambda net, x: net.norm(x[..., 0]) if net.training else x.T, {"output": 2}),
}


@pytest.mark.parametrize("name", RETURNED)
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.filterwarnings("ignore:The use of `x.T`")
def test_which_dimension_has_the_rows(name: str, rows: int) -> None:
    last, expected = RETURNED[name]
    if name in ("an entry for each row", "not with one row") and rows != 2:
        pytest.skip("other names or an error for this number of rows")
    net, x = Net(last), torch.randn(rows, 3, WIDTH)
    layout = Layout()
    layout.dims = {"input 0": 0}
    found = output_dims(Cuttable(net, x, blocks=None), layout)
    assert found is not None
    assert {key: found[key] for key in expected} == expected


def test_nothing_is_known_of_a_model_that_takes_no_other_number_of_rows() -> None:
    layout = Layout()
    layout.dims = {"input 0": 0}
    net = Net(lambda net, x: x.view(2, 3, WIDTH))
    assert output_dims(Cuttable(net, torch.randn(2, 3, WIDTH), blocks=None), layout) is None


ROW, TWO, NUMBER = torch.ones(1, 2), torch.zeros(2, 2), torch.tensor(3.0)

# What a model returns for two micro-batches, and what that is together; a list stands for `MicroBatches`.
TOGETHER: dict[str, tuple[Any, Any, Any]] = {
    "rows": (ROW, TWO, torch.cat([ROW, TWO])),
    "a number": ({"x": ROW, "loss": NUMBER}, {"x": TWO, "loss": NUMBER + 1}, {"loss": [NUMBER, NUMBER + 1]}),
    "one number": ((ROW, NUMBER), (TWO, NUMBER), (torch.cat([ROW, TWO]), NUMBER)),
    "other sizes": ({"x": ROW.T, "n": None}, {"x": TWO, "n": None}, {"x": [ROW.T, TWO], "n": None}),
    "some lack it": ({"x": ROW, "of images": NUMBER}, {"x": TWO}, {"x": torch.cat([ROW, TWO]), "of images": NUMBER}),
    "only the second": ({"x": ROW, "n": 2}, {"x": TWO, "m": 3, "n": 2}, {"x": torch.cat([ROW, TWO]), "m": 3, "n": 2}),
    "plain values": ((ROW, 1), (TWO, 2), (torch.cat([ROW, TWO]), [1, 2])),
    "other nesting": ((ROW,), (TWO, TWO), [(ROW,), (TWO, TWO)]),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_what_no_pipe_has_cut_is_joined_where_it_has_rows(name: str) -> None:
    one, other, expected = TOGETHER[name]

    def compare(got: Any, wanted: Any) -> None:
        assert isinstance(got, MicroBatches) == isinstance(wanted, list)
        if isinstance(wanted, dict):
            assert isinstance(got, dict)
            for key in wanted:
                compare(got[key], wanted[key])
        elif isinstance(wanted, list | tuple):
            for each, value in zip(got, wanted, strict=True):
                compare(each, value)
        else:
            assert torch.equal(got, wanted) if isinstance(wanted, Tensor) else got == wanted

    compare(joined(MicroBatches([one, other])), expected)


def test_in_another_dimension_tensors_are_joined_that_have_as_many_entries_there() -> None:
    tokens, scores = torch.ones(1, 3, 2), torch.ones(1, 4, 3, 3)
    found = joined(MicroBatches([{"x": tokens, "scores": scores}, {"x": tokens, "scores": scores + 1}]), 1)
    assert found["x"].shape == (1, 6, 2)
    assert isinstance(found["scores"], MicroBatches)
