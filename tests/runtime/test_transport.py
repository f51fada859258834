import itertools

import pytest
import torch
from torch import Tensor, nn

from pipework import Pipe


class Watched(nn.Module):
    """Keeps where its inputs lie, and its outputs, so that nothing else comes to lie there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inputs: list[int] = []
        self.outputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.inputs.append(x.data_ptr())
        output: Tensor = self.linear(x)
        self.outputs.append(output.detach())
        return output


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "hanayo", "zb-v", "v-half", "v-min", "dualpipe-v"])
def test_a_value_reaches_the_next_stage_without_a_copy_also_where_a_v_turns(schedule: str) -> None:
    layers = [Watched() for _ in range(2 if schedule == "1f1b" else 4)]
    pipe = Pipe(
        nn.Sequential(*layers), 4, "never", balance=[1] * len(layers), devices=["cpu"] * 2, schedule=schedule,
        loss_fn=nn.functional.mse_loss,
    )  # fmt: skip
    pipe(torch.randn(8, 4), target=torch.randn(8, 4)).backward()
    for layer, following in itertools.pairwise(layers):
        assert [output.data_ptr() for output in layer.outputs] == following.inputs
