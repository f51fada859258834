import torch
from torch import nn

from pipework.runtime.stage.execution_views import View, identity


def test_refresh_takes_over_what_the_user_changed() -> None:
    layer = nn.Linear(2, 2)
    view = View(layer, {identity(layer)})
    layer.eval()
    layer.note = "new"
    layer.weight = nn.Parameter(torch.zeros(2, 2))
    layer.register_forward_hook(lambda *_: None)
    view.refresh()
    assert not view.module.training
    assert view.module.note == "new"
    assert view.module.weight is layer.weight
    assert view.module._forward_hooks is layer._forward_hooks


def test_a_copy_of_a_compiled_module_runs_itself() -> None:
    layers = [nn.Linear(2, 2), torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager")]
    layers[0].compile(backend="eager")
    for layer in layers:
        view = View(layer, {identity(layer)}).module
        for parameters in (each._parameters for each in view.modules()):
            parameters.update({name: torch.zeros_like(value) for name, value in parameters.items()})
        assert not view(torch.ones(1, 2)).any()
        assert layer(torch.ones(1, 2)).any()
