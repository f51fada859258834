"""What travels between ranks may change its shape, dtype and structure from step to step: it just works."""

from typing import Any

import torch
from torch import Tensor, nn

from pipework import Mesh
from tests.distributed.together.alike import both, square, train_alike
from tests.jobs import runs_on


class Forms(nn.Linear):
    """Gives what a flag asks for: another dtype, another number of tensors, another structure around them."""

    def forward(self, x: Tensor, form: str) -> Any:
        y = super().forward(x)
        match form:
            case "half":
                return y.half()
            case "pair":
                return y, x.detach().argmax(-1)
            case "nested":
                return {"y": y, "more": [x, (None, 3, "text")]}
            case "wide":
                return torch.cat([y, y], -1)
        return y


class Reads(nn.Linear):
    def forward(self, value: Any, *more: Any) -> Tensor:
        if isinstance(value, dict):
            value = value["y"] + value["more"][0] * value["more"][1][1]
        for each in more:
            value = value + each[..., None].to(value.dtype)
        return super().forward(value.float()[..., :6]).flatten(1).mean(1)


BATCHES = [
    (8, 1, "one"), (7, 1, "one"), (3, 1, "one"), (1, 1, "one"), (8, 5, "one"), (8, 9, "half"), (8, 1, "half"),
    (8, 1, "pair"), (5, 2, "pair"), (8, 1, "nested"), (8, 3, "wide"), (8, 1, "one"), (12, 1, "half"),
]  # fmt: skip


@runs_on(2)
def test_forms_change_from_step_to_step(mesh: Mesh) -> None:
    pipes = pipe, threads = both(nn.Sequential(Forms(6, 6), Reads(6, 1)), mesh, schedule="1f1b", loss_fn=square)
    for rows, length, form in BATCHES:
        x, y = torch.randn(rows, length, 6), torch.randn(rows)
        for each in pipes:
            each.zero_grad()
        train_alike(pipes, x, form, target=y)
        with torch.no_grad():  # evaluation in between has messages of its own form
            assert torch.equal(pipe(x[:1], form, outputs="all"), threads(x[:1], form))
