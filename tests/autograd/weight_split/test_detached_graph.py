"""Which calls get a detached graph; test_operators.py compares their gradients with autograd's."""

import torch
from torch.nn import functional as F

from pipework.autograd.weight_split.detached_graph import with_detached_graph
from pipework.autograd.weight_split.store import WeightGradientAlias, WeightGradientStore


def alias_of(*shape: int) -> WeightGradientAlias:
    return WeightGradientAlias.of(torch.ones(*shape), WeightGradientStore({}), None)


def test_what_is_not_deferred() -> None:
    weight, bias, x = alias_of(3, 2), alias_of(2), torch.ones(4, 3)
    with torch._C.DisableTorchFunctionSubclass():
        assert with_detached_graph(torch.mm, (x, weight), {"out": torch.empty(4, 2)}) is None
        assert with_detached_graph(torch.addmm, (bias, x, x.t()), {}) is None, "a bias alone does not pay"
        for options, is_deferred in (({}, True), ({"sparse": True}, False), ({"max_norm": 1.0}, False)):
            operation = with_detached_graph(F.embedding, (torch.tensor([0]), weight), options)
            assert (operation is not None) == is_deferred
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            assert with_detached_graph(torch.mm, (x, weight), {}) is None, "the user's hook would unpack twice"
