"""Which calls get a detached graph; test_operators.py compares their gradients with autograd's."""

import torch
from torch.nn import functional as F

from pipework.autograd.weight_split.detached_graph import OPERATORS, with_detached_graph
from pipework.autograd.weight_split.store import WeightGradientAlias, WeightGradientStore


def alias_of(*shape: int) -> WeightGradientAlias:
    return WeightGradientAlias.of(torch.ones(*shape), WeightGradientStore({}), None)


def test_einsum_has_no_formula_and_gets_a_detached_graph() -> None:
    weight, x = alias_of(3, 2), torch.ones(4, 3, requires_grad=True)
    arguments = "bi,ij->bj", x, weight
    with torch._C.DisableTorchFunctionSubclass():
        assert OPERATORS[torch.einsum](*arguments) is None
        operation = with_detached_graph(torch.einsum, arguments, {})
        assert operation is not None
        assert operation.parameters == (weight,)
        output = operation.run()
        operation.wait_in([])
        (of_input,) = operation.input_gradients(torch.ones(4, 2))
        ((alias, of_weight),) = operation.gradients(operation.kept, torch.ones(4, 2))
    assert output.grad_fn is not None
    assert alias is weight
    assert torch.equal(of_input, torch.full((4, 3), 2.0))
    assert torch.equal(of_weight, torch.full((3, 2), 4.0))
    assert weight.grad is None
    assert x.grad is None


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
