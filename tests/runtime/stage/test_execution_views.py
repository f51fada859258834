import torch
from torch import nn

from pipework.runtime.stage.execution_views import View, execution_layers, shared_modules


def test_only_modules_of_several_stages_are_shared() -> None:
    inner, alone = nn.Linear(2, 2), nn.Linear(2, 2)
    outer = nn.Sequential(inner)
    shared = shared_modules([[outer, outer], [inner, alone]])
    assert shared == {id(inner)}
    runnable, views = execution_layers([outer, alone], shared)
    assert runnable[0] is not outer
    assert runnable[1] is alone
    assert len(views) == 1


def test_a_view_computes_the_same_with_slots_of_its_own() -> None:
    layer = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    view = View(layer).module
    x = torch.randn(4, 2)
    assert torch.equal(view(x), layer(x))
    assert view[0]._parameters is not layer[0]._parameters
    assert view[0].weight is layer[0].weight
    assert view[1].running_mean is layer[1].running_mean
    view[0]._parameters["weight"] = None
    assert layer[0].weight is not None


def test_refresh_takes_over_what_the_user_changed() -> None:
    layer = nn.Linear(2, 2)
    view = View(layer)
    layer.eval()
    layer.note = "new"
    layer.weight = nn.Parameter(torch.zeros(2, 2))
    layer.register_forward_hook(lambda *_: None)
    view.refresh()
    assert not view.module.training
    assert view.module.note == "new"
    assert view.module.weight is layer.weight
    assert view.module._forward_hooks is layer._forward_hooks
