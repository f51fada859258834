"""The search of a graph; pipes with hidden parameters are in tests/faults/test_odd_losses.py."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pipework.autograd.aliases import Aliases
from pipework.autograd.hidden_parameters import graph_leaves, refuse_hidden_parameters
from pipework.runtime.stage.stage import Stage


def test_the_leaves_of_a_graph_are_found_once_each() -> None:
    x, w, frozen = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True), torch.ones(2)
    outputs = [(x * w).exp() * w * frozen, x + 1, frozen]
    leaves = list(graph_leaves(outputs))
    assert {id(leaf) for leaf in leaves} == {id(x), id(w)}
    assert len(leaves) == 2
    assert list(graph_leaves([frozen])) == []


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
