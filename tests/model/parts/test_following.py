"""Changes of a model after a pipe was attached: the parts follow them, or an error says that they cannot."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from pipework import attach


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x + self.shift


class Model(nn.Module):
    """Has a container beside its units, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.position = nn.Parameter(torch.zeros(4))
        self.inner = Inner()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        dtype = next(self.parameters()).dtype  # perhaps of a parameter of another part
        return nn.functional.mse_loss(self.inner(self.first(x.to(dtype)) + self.position), labels.to(dtype))


def batch() -> dict[str, Tensor]:
    return {"x": torch.linspace(-1, 1, 32).view(8, 4), "labels": torch.linspace(1, -1, 32).view(8, 4)}


def with_pipe() -> Model:
    torch.manual_seed(0)
    model = Model()
    attach(model, batch(), chunks=4, balance=[3, 2], devices=["cpu"] * 2)
    return model


def step(model: nn.Module) -> dict[str, Tensor | None]:
    model(**batch()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def replace(model: nn.Module) -> None:
    model.position = nn.Parameter(torch.full((4,), 0.3))


def replace_inside(model: nn.Module) -> None:
    model.inner.shift = nn.Parameter(torch.full((4,), 0.3))


def assign(model: nn.Module) -> None:
    state = {name: tensor.clone() + 0.1 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def test_parameters_may_be_replaced_for_one_call_and_for_good() -> None:
    model = with_pipe()
    others = {name: parameter + 0.1 for name, parameter in model.named_parameters()}
    plain = copy.deepcopy(model)
    del plain.forward
    with torch.no_grad():
        for parameters in (others, {}):
            losses = [torch.func.functional_call(each, parameters, (), batch()) for each in (model, plain)]
            torch.testing.assert_close(*losses)
    for change in (replace, replace_inside, assign):
        for each in (model, plain):
            each.zero_grad()
            change(each)
        expected = step(plain)
        for name, gradient in step(model).items():
            torch.testing.assert_close(gradient, expected[name], msg=name)


def forward_of(model: Any) -> None:
    inner = model.inner
    inner.forward = lambda x: Inner.forward(inner, x) * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.inner.blocks.append(nn.Linear(4, 4)), "modules were added to inner.blocks"),
        (lambda model: setattr(model, "extra", nn.Linear(4, 4)), "modules were added to the model itself"),
        (lambda model: model.inner.register_forward_hook(lambda *given: None), "inner .Inner. was given hooks"),
        (lambda model: model.inner.register_forward_pre_hook(lambda *given: None), "inner .Inner. was given hooks"),
        (forward_of, "Inner.forward was replaced"),
        (lambda model: setattr(model, "chosen", [model.first]), "Model.chosen refers to a module and was assigned"),
        (lambda model: setattr(model, "inner", Inner()), "inner.blocks.0 of Model was replaced by another module"),
        (lambda model: parametrizations.weight_norm(model.first), "first of Model became a ParametrizedLinear"),
        (lambda model: setattr(model, "first", nn.Linear(4, 4)), "first of Model was replaced by another module"),
    ],
)
def test_what_parts_cannot_follow_is_refused(change: Callable[[nn.Module], Any], message: str) -> None:
    model = with_pipe()
    step(model)
    change(model)
    with pytest.raises(RuntimeError, match=f"{message}.*after the pipe was attached.*del model.forward"):
        step(model)


def test_hooks_on_units_and_on_the_model_and_another_dtype_are_followed() -> None:
    model, calls = with_pipe(), []
    model.first.register_forward_hook(lambda *given: calls.append("unit"))
    model.register_forward_hook(lambda *given: calls.append("model"))
    plain = copy.deepcopy(model.double())
    del plain.forward
    with torch.no_grad():
        loss = model(**batch())
        assert sorted(calls) == ["model", *["unit"] * 4]
        torch.testing.assert_close(loss, plain(**batch()), rtol=1e-12, atol=0)


def test_a_number_that_changes_in_each_step_does_not_make_each_step_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    again: list[Any] = []
    monkeypatch.setattr("pipework.model.parts.part.Part.watch_again", lambda part: again.append(part))
    model = with_pipe()
    for number in range(3):
        model.warmth = 0.1 * number  # assigned for the first time, it may choose a way
        step(model)
    assert len(again) == 2  # the parts
    model.late = True
    step(model)
    assert len(again) == 4


def test_attributes_buffers_and_flags() -> None:
    model = with_pipe()
    parts: Any = list(vars(model)["forward"]._pipe)
    parts[0].model.kept = 1
    model.factor, model.mask = 3.0, torch.zeros(4)
    model.register_buffer("keep", torch.ones(4))
    model.inner.blocks.eval()
    step(model)
    for part in parts:
        assert (part.model.factor, part.model.mask is model.mask, part.model.keep is model.keep) == (3.0, True, True)
        assert (part.training, part.model.inner.training, part.model.inner.blocks.training) == (True, True, False)
    del model.factor
    step(model)
    assert not hasattr(parts[0].model, "factor")
    assert parts[0].model.kept == 1, "what the part has set itself stays"
