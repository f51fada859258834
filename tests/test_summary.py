import pytest
import torch
from torch import nn

from pipework import Pipe, attach
from pipework.planning import Rates, profile
from pipework.summary import readable_bytes, table
from tests.model.parts.models import Plain, batch_of


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * 2**30, "3.0 GiB"), (2**52, "4096.0 TiB")]
)
def test_readable_bytes(size, text):
    assert readable_bytes(size) == text


def test_a_row_for_each_partition_and_the_predicted_bubble():
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    pipe = Pipe(layers, chunks=4, balance=[2, 1], devices=["cpu", "cpu"])
    assert table(pipe).splitlines() == [
        "Pipe: 3 layers in 2 partitions",
        "  partition  device  layers      parameters  bytes",
        "          0  cpu     0 .. 1 (2)          72  288 B",
        "          1  cpu     2                   72  288 B",
        "schedule gpipe, 4 chunks, checkpoint 'except_last', bubble 16.7% if all partitions take equally long",
    ]


def test_activations_in_host_memory_and_the_bubble_of_a_plan_are_named():
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    pipe = Pipe(layers, 8, "never", balance=[2, 1], devices=["cpu", "cpu"], offload="activations")
    assert [line.split()[-1] for line in table(pipe).splitlines()[1:3]] == ["offloads", "8"]
    assert "8 of 8" in table(pipe)
    x = torch.zeros(8, 8)
    measured = profile(layers, x, rates=Rates(1e9, 1e9), workers=2)
    plan = measured.predict(["device"] * 2, balance=[2, 1], chunks=4)
    assert table(Pipe(layers, plan=plan, devices=["cpu", "cpu"])).endswith(
        f"bubble {plan.simulation.bubble:.1%} by the plan"
    )


@pytest.mark.usefixtures("recorded_graphs")
@pytest.mark.parametrize(
    ("how", "text"), [(False, ""), (True, "graphs on, "), (("auto", "hooks"), "graphs auto, hooks, ")]
)
def test_graphs_are_named(how, text):
    pipe = Pipe(nn.Sequential(nn.Linear(8, 8)), devices=["cpu"], graphs=how)
    assert f"checkpoint 'except_last', {text}bubble" in table(pipe)


def test_a_pipe_of_a_model_shows_its_units():
    model = Plain()
    pipe = attach(model, batch_of(Plain), chunks=4, balance=[1, 3], devices=["cpu", "cpu"])
    assert table(pipe).splitlines()[:-1] == [
        "Pipe of Plain: 4 units in 2 partitions",
        "  partition  device  units                     parameters  bytes",
        "          0  cpu     blocks.0                          42  168 B",
        "          1  cpu     blocks.1 .. blocks.3 (3)         126  504 B",
    ]
