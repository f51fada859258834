"""Gradients that would end in a stage are refused; programs that keep tensors in other ways are left alone."""

import copy
import gc
import io
import pickle
import re
import warnings
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipework import Pipe, spot_checks
from pipework.autograd.aliases import Aliases
from pipework.autograd.stray_gradients import refuse_hidden_parameters
from pipework.runtime.stage.stage import Stage
from pipework.testing import reference_step

LOST = r"reached stage 0 \(layers '0' to '1'\) outside of the pipe's own backward"


class Gate(nn.Module):
    """A layer with a loss of its own, which it keeps in some way."""

    def __init__(self, keep: Callable[["Gate", torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__()
        self.layer, self.experts = nn.Linear(4, 4), nn.Linear(4, 2)
        self.keep = keep
        self.aux: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.layer(x)
        self.keep(self, self.experts(x).softmax(-1).mean(0).square().sum(), output)
        return output


def as_attribute(gate: Gate, aux: torch.Tensor, output: torch.Tensor) -> None:
    gate.aux = aux


def pipe_of(gate: nn.Module, schedule: str = "1f1b", checkpoint: str = "never", *, inside: bool = True) -> Pipe:
    layers = nn.Sequential(gate, nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1))
    loss_fn = functional.mse_loss if inside else None
    return Pipe(layers, 4, checkpoint, balance=[2, 2], devices=["cpu"] * 2, schedule=schedule, loss_fn=loss_fn)


def loss_of(pipe: Pipe, x: torch.Tensor, y: torch.Tensor, *, inside: bool = True) -> torch.Tensor:
    return pipe(x, target=y) if inside else functional.mse_loss(pipe(x), y)


@pytest.mark.parametrize(("schedule", "inside"), [("gpipe", False), ("gpipe", True), ("1f1b", True), ("zb-h1", True)])
def test_a_loss_that_a_layer_keeps(schedule: str, checkpoint: str, inside: bool) -> None:
    gate = Gate(as_attribute)
    pipe = pipe_of(gate, schedule, checkpoint, inside=inside)
    loss = loss_of(pipe, torch.randn(8, 4), torch.randn(8, 1), inside=inside)
    with pytest.raises(RuntimeError, match=LOST + r".*\(layer '0' \(Gate\) has one: it keeps 'aux'\)"):
        (loss + gate.aux).backward()


def test_a_loss_of_the_input_of_a_stage_that_is_recomputed(checkpoint: str) -> None:
    class Penalty(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.penalty = x.abs().mean()
            return x

    layers = nn.Sequential(nn.Linear(4, 4), Penalty(), nn.Linear(4, 1))
    pipe = Pipe(layers, 4, checkpoint, balance=[1, 2], devices=["cpu"] * 2)
    loss = functional.mse_loss(pipe(torch.randn(8, 4)), torch.randn(8, 1))
    with pytest.raises(RuntimeError, match=r"layer '1' \(Penalty\) has one: it keeps 'penalty'"):
        (loss + pipe[1].penalty).backward()


def test_one_kept_in_a_list() -> None:
    gate, kept = Gate(lambda gate, aux, output: kept.append(aux)), []
    loss = pipe_of(gate)(torch.randn(8, 4), target=torch.randn(8, 1))
    with pytest.raises(RuntimeError, match=LOST + r".* a tensor kept from a forward with its graph, and"):
        (loss + sum(kept)).backward()


FREED = (
    r"a tensor of stage 0 \(layers '0' to '1'\) was kept with its graph from another micro-batch or step{}, "
    r"and .*retain_graph=True does not help"
)


@pytest.mark.parametrize(("schedule", "inside"), [("gpipe", False), ("1f1b", True), ("zb-h1", True)])
def test_a_tensor_with_its_graph_that_several_micro_batches_use(schedule: str, inside: bool) -> None:
    class Cached(nn.Linear):
        cached = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.cached is None:
                self.cached = self.weight.softmax(1)
            return functional.linear(x, self.cached, self.bias)

    pipe = pipe_of(Cached(4, 4), schedule, inside=inside)
    with pytest.raises(RuntimeError, match="graph a second time") as caught:
        loss_of(pipe, torch.randn(8, 4), torch.randn(8, 1), inside=inside).backward()
    notes = "\n".join(caught.value.__notes__)
    assert re.search(FREED.format(r" \(layer '0' \(Cached\) has one: it keeps 'cached'\)"), notes), notes


def detached(gate: Gate, aux: torch.Tensor, output: torch.Tensor) -> None:
    gate.aux = aux.detach() if gate.aux is None else 0.9 * gate.aux + 0.1 * aux.detach()


def looked_at(gate: Gate, aux: torch.Tensor, output: torch.Tensor) -> None:
    output.retain_grad()
    gate.aux = output


def differentiated_within(gate: Gate, aux: torch.Tensor, output: torch.Tensor) -> None:
    (gate.aux,) = torch.autograd.grad(aux, gate.experts.weight)


def pickled_within(gate: Gate, aux: torch.Tensor, output: torch.Tensor) -> None:
    pickle.dump(gate.experts, io.BytesIO())
    copy.deepcopy(gate.experts)


RIGHT = {
    "detached": detached,
    "looked at": looked_at,
    "only for the log": as_attribute,
    "within": differentiated_within,
    "pickled within": pickled_within,
}


@pytest.mark.parametrize(
    ("keep", "schedule"),
    # A schedule that splits backwards has no edge to a parameter by which a layer could differentiate.
    [(RIGHT[name], way) for name in RIGHT for way in ("gpipe", "1f1b", "zb-h1") if (name, way) != ("within", "zb-h1")],
)
def test_right_programs(keep: Callable[[Gate, torch.Tensor, torch.Tensor], None], schedule: str) -> None:
    gate = Gate(keep)
    pipe, x, y = pipe_of(gate, schedule), torch.randn(8, 4), torch.randn(8, 1)
    plain = nn.Sequential(*copy.deepcopy(list(pipe)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(spot_checks.FIRST + 1):
            pipe.zero_grad()
            pipe(x, target=y).backward()
            if isinstance(gate.aux, torch.Tensor):
                gate.aux.item() if gate.aux.dim() == 0 else gate.aux.sum().item()
    reference_step(plain, x, y, functional.mse_loss, chunks=4, key=0)
    for parameter, expected in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert parameter.grad is expected.grad is None or torch.equal(parameter.grad, expected.grad)


def test_what_a_layer_keeps_does_not_keep_the_pipe() -> None:
    gate = Gate(as_attribute)
    pipe = pipe_of(gate)
    pipe(torch.randn(8, 4), target=torch.randn(8, 1)).backward()
    gone = weakref.ref(gate)
    del pipe, gate
    gc.collect()
    assert gone() is None


def test_few_mini_batches_have_hooks() -> None:
    pipe, x, y = pipe_of(Gate(as_attribute)), torch.randn(8, 4), torch.randn(8, 1)
    hooks = []
    pipe[2].register_forward_hook(lambda layer, args, output: hooks.append(bool(layer.weight._backward_hooks)))
    for _ in range(spot_checks.FIRST + 1):
        pipe(x, target=y).backward()
    assert hooks == [True] * 4 * spot_checks.FIRST + [False] * 4


# Hidden parameters; pipes with them are in tests/faults/test_odd_losses.py


class _Stage(SimpleNamespace):
    place = Stage.place


def test_a_parameter_that_is_not_read_from_its_module_is_refused_by_name() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    stage = _Stage(index=3, layers=[SimpleNamespace(name="head", module=layer)])
    aliases, hidden = Aliases([layer]), layer.weight
    with aliases.standing_in():
        refuse_hidden_parameters(stage, aliases, [x], [layer(x)])
        with pytest.raises(RuntimeError, match=r"stage 3 .*'head'.* uses parameter 'head\.weight' of layer 'head'"):
            refuse_hidden_parameters(stage, aliases, [x], [layer(x) + hidden.sum()])
        with pytest.raises(RuntimeError, match=r"a tensor of shape \(5,\) that requires a gradient.* makes it, it"):
            refuse_hidden_parameters(stage, aliases, [x], [layer(x) + torch.ones(5, requires_grad=True).sum()])


def test_a_view_of_the_input_may_have_a_gradient_that_nobody_reads() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    aliases = Aliases([layer])
    with aliases.standing_in():
        refuse_hidden_parameters(_Stage(index=0, layers=[]), aliases, [x], [layer(x[:, :].requires_grad_())])
