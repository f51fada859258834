import torch
from torch import nn

from pipework.model.sequential import TupleRule
from pipework.runtime.device import WorkerDevice
from pipework.runtime.stage.execution_views import identity
from pipework.runtime.stage.stage import Stage


def stage_of(layers: list[nn.Module], shared: set[int] = frozenset()) -> Stage:
    return Stage(
        1, [(f"layer{number}", layer) for number, layer in enumerate(layers)], first_number=3,
        device=WorkerDevice(torch.device("cpu")), shared=shared, shares_output=False, skips=[],
        tuples=TupleRule.BY_SIGNATURE,
    )  # fmt: skip


class Last(nn.Module):
    def forward(self, value: object, target: object) -> object:
        return value


def test_layers_keep_their_names_and_their_numbers_in_the_whole_model() -> None:
    stage = stage_of([nn.ReLU(), nn.Tanh()])
    assert [(layer.name, layer.number) for layer in stage.layers] == [("layer0", 3), ("layer1", 4)]
    assert [type(module) for module in stage.modules] == [nn.ReLU, nn.Tanh]


def test_the_target_does_not_count_among_the_last_layers_arguments() -> None:
    stage = stage_of([nn.ReLU(), Last()])
    assert [layer.takes_tuple_whole for layer in stage.layers] == [True, False]
    assert [layer.takes_tuple_whole for layer in stage.layers_with_target] == [True, True]


def test_a_stage_trains_while_any_of_its_layers_does() -> None:
    layers = [nn.ReLU(), nn.Tanh()]
    stage = stage_of(layers)
    assert stage.training
    layers[0].eval()
    assert stage.training
    layers[1].eval()
    assert not stage.training


def test_a_shared_module_is_run_through_a_view_that_follows_it() -> None:
    layer = nn.Linear(2, 2)
    stage = stage_of([layer], {identity(layer)})
    (view,) = stage.modules
    assert view is not layer
    layer.weight = nn.Parameter(torch.zeros(2, 2))
    stage.refresh()
    assert view.weight is layer.weight
    view.note = "seen"
    stage.hand_back()
    assert layer.note == "seen"
