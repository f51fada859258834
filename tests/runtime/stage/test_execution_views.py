import torch
from torch import nn

from pipework.runtime.stage.execution_views import View, execution_layers, identity, shared_modules


def test_only_modules_of_several_stages_are_shared() -> None:
    inner, alone = nn.Linear(2, 2), nn.Linear(2, 2)
    outer = nn.Sequential(inner)
    shared = shared_modules([[outer, outer], [inner, alone]])
    assert shared == {identity(inner)}
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


def test_only_what_is_around_shared_modules_is_copied() -> None:
    inner, alone = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
    layer = nn.ModuleList([nn.Sequential(inner), alone])
    (view,), _ = execution_layers([layer], {identity(inner)})
    assert view is not layer
    assert view[0][0] is not inner
    assert view[1] is alone


def test_a_copy_of_a_compiled_module_runs_itself() -> None:
    layers = [nn.Linear(2, 2), torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager")]
    layers[0].compile(backend="eager")
    for layer in layers:
        view = View(layer).module
        for parameters in (each._parameters for each in view.modules()):
            parameters.update({name: torch.zeros_like(value) for name, value in parameters.items()})
        assert not view(torch.ones(1, 2)).any()
        assert layer(torch.ones(1, 2)).any()
