"""What cannot be told of the ranks' optimizers is refused; what they write is in tests/distributed/together/."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from pipework.backend import ProcessGroupView
from pipework.integrations.optimizer_file import load_whole_optimizer, names_by_group, save_whole_optimizer


def two_ranks(other: list[list[str]]) -> ProcessGroupView:
    """The first of two ranks; the other one has these names in the groups of its optimizer."""
    return ProcessGroupView(
        everyone=(0, 1), all_gather_text=lambda text: [text, json.dumps({**json.loads(text), "result": other})]
    )


def made() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """An optimizer of the first layer, on a rank whose model knows the second one, too."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    return model, torch.optim.Adam([{"params": [model[0].weight]}, {"params": [model[0].bias], "lr": 0.1}])


def test_groups_are_joined_in_the_order_of_the_model() -> None:
    assert names_by_group(two_ranks([["1.weight"], ["1.bias"]]), *made()) == [
        ["0.weight", "1.weight"],
        ["0.bias", "1.bias"],
    ]
    assert names_by_group(two_ranks([["0.weight", "1.bias"], []]), *made()) == [["0.weight", "1.bias"], ["0.bias"]]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ([["1.weight"]], r"the optimizers of the ranks have \[2, 1\] groups of parameters: make the same groups"),
        (
            [["1.bias", "1.weight"], []],
            r"group 0 of the optimizer begins with 1.bias, 1.weight: its state is "
            r"saved in the order of model.parameters\(\)",
        ),
    ],
)
def test_groups_that_cannot_be_joined_are_refused(other: list[list[str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        names_by_group(two_ranks(other), *made())


def test_parameters_of_another_model_are_refused() -> None:
    _, optimizer = made()
    with pytest.raises(ValueError, match=r"parameters that are not the pipe's; their shapes: \(3, 2\) in group 0"):
        names_by_group(two_ranks([]), nn.Linear(2, 3), optimizer)


def test_one_process_reads_what_it_has_written_in_any_order(tmp_path: Path) -> None:
    model, _ = made()
    optimizers = [torch.optim.Adam([*reversed([*model.parameters()])], lr=lr) for lr in (0.1, 0.2)]
    model(torch.randn(4, 2)).sum().backward()
    optimizers[0].step()
    save_whole_optimizer(ProcessGroupView(), model, optimizers[0], tmp_path / "optimizer.pt")
    load_whole_optimizer(ProcessGroupView(), model, optimizers[1], tmp_path / "optimizer.pt")
    (tmp_path / "optimizer.pt").write_bytes(b"")  # nothing is read of it any more
    assert optimizers[1].param_groups[0]["lr"] == 0.1
    for parameter in model.parameters():
        assert torch.equal(*(each.state[parameter]["exp_avg"] for each in optimizers))


def test_a_state_of_other_groups_is_refused(tmp_path: Path) -> None:
    model, optimizer = made()
    torch.save(torch.optim.Adam(model.parameters()).state_dict(), tmp_path / "optimizer.pt")
    with pytest.raises(
        ValueError, match=r"groups have \[4\] parameters, and those of the one here have \[1, 1\]: train"
    ):
        load_whole_optimizer(ProcessGroupView(), model, optimizer, tmp_path / "optimizer.pt")
