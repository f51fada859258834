"""Drives a `WeightGradientStore` as a stage does, and compares it with plain autograd run micro-batch by
micro-batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipework import torch_private
from pipework.autograd.aliases import Aliases
from pipework.autograd.weight_split.store import WeightGradientAlias, WeightGradientStore

Layer = Callable[..., Tensor]


@dataclass
class Run:
    """What came out of some micro-batches."""

    outputs: list[Tensor] = field(default_factory=list)
    of_inputs: list[Tensor | None] = field(default_factory=list)
    of_parameters: list[Tensor | None] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)  # tensors kept between I and W, by micro-batch
    waits: list[bool | None] = field(default_factory=list)  # what became of each parameter


def leaves(inputs: Sequence[Any]) -> list[Any]:
    """Copies with the same strides, so that no run sees the other's gradients."""
    return [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x.detach()).requires_grad_(x.requires_grad)
        if isinstance(x, Tensor)
        else x
        for x in inputs
    ]


def seed(output: Tensor, number: int) -> Tensor:
    """A gradient for an output, the same in each run."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)


def gradients(tensors: Sequence[Any]) -> list[Tensor | None]:
    return [x.grad for x in tensors if isinstance(x, Tensor)]


def plainly(layer: Layer, parameters: Sequence[Tensor], batches: Sequence[Sequence[Any]]) -> Run:
    """Autograd as always."""
    run, own = Run(), leaves(parameters)
    for number, batch in enumerate(batches):
        inputs = leaves(batch)
        output = layer(*own, *inputs)
        run.outputs.append(output.detach())
        if output.requires_grad:
            output.backward(seed(output, number))
        run.of_inputs += gradients(inputs)
    run.of_parameters = gradients(own)
    return run


class Stage:
    """Some parameters and what a stage does with them."""

    def __init__(self, parameters: Sequence[Tensor], known: dict[int, bool] | None = None) -> None:
        self.weight_store = WeightGradientStore({} if known is None else known)
        self.aliases = [
            WeightGradientAlias.of(p.detach(), self.weight_store, self.weight_store.known(p)) if p.requires_grad else p
            for p in parameters
        ]

    def forward(self, number: int, layer: Layer, inputs: Sequence[Any]) -> Tensor:
        self.weight_store.begin(number)
        output = layer(*self.aliases, *inputs)
        self.weight_store.end()
        return output

    def input_half(self, number: int, output: Tensor, *, again: bool = False) -> None:
        if output.requires_grad:
            roots, seeds = (output,), (seed(output, number),)
            self.weight_store.differentiate(number, lambda: torch_private.run_backward(roots, seeds, again))

    def both_halves(self, number: int, output: Tensor) -> None:
        self.input_half(number, output)
        self.weight_half(number)

    def weight_half(self, number: int, *, again: bool = False) -> None:
        self.weight_store.add_weight_gradients(number, again=again)


def split(layer: Layer, parameters: Sequence[Tensor], batches: Sequence[Sequence[Any]]) -> Run:
    """The same in halves: the first micro-batch on its own, then all forwards, all I, all W."""
    run = Run()
    stage = Stage(leaves(parameters))
    inputs = [leaves(batch) for batch in batches]
    outputs = []
    for numbers in ([0], range(1, len(batches))):
        for number in numbers:
            outputs.append(stage.forward(number, layer, inputs[number]))
        for number in numbers:
            stage.input_half(number, outputs[number])
            run.waiting.append(len(stage.weight_store.kept(number)))
        for number in numbers:
            stage.weight_half(number)
    run.outputs = [output.detach() for output in outputs]
    run.of_inputs = [gradient for each in inputs for gradient in gradients(each)]
    run.of_parameters = [alias.grad for alias in stage.aliases]
    run.waits = [alias.deferred for alias in stage.aliases if isinstance(alias, WeightGradientAlias)]
    assert not any(stage.weight_store.kept(number) for number in range(len(batches)))
    return run


def same(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert torch.equal(one, other), f"they differ by {(one - other).abs().max()}"


def check(
    layer: Layer, parameters: Sequence[Tensor], batches: Sequence[Sequence[Any]], *, waits: bool | Sequence[bool | None]
) -> Run:
    """Compares everything bitwise, and whether what should wait for W did.

    Args:
        layer: called with the parameters, then with a micro-batch's inputs.
        parameters: plain tensors.
        batches: the inputs of each micro-batch.
        waits: of each parameter that requires a gradient, whether it is put off.
    """
    expected, actual = plainly(layer, parameters, batches), split(layer, parameters, batches)
    same(actual.outputs, expected.outputs)
    same(actual.of_inputs, expected.of_inputs)
    same(actual.of_parameters, expected.of_parameters)
    if isinstance(waits, bool):
        waits = [waits] * len(actual.waits)
    assert actual.waits == list(waits)
    assert [bool(n) for n in actual.waiting] == [False, *[any(waits)] * (len(batches) - 1)]
    return actual


def check_module(module: nn.Module, batches: Sequence[Sequence[Any]], *, waits: dict[str, bool] | bool) -> Run:
    """The same for a module, whose parameters are replaced in its slots."""
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    parameters = [p for p in module.parameters() if p.requires_grad]

    def layer(*values: Any) -> Tensor:
        own, inputs = values[: len(names)], values[len(names) :]
        aliases = Aliases([module])
        for n, (slots, name, parameter, _) in enumerate(aliases._slots):
            which = next(i for i, p in enumerate(parameters) if p is parameter)
            aliases._slots[n] = slots, name, parameter, own[which]
        with aliases.standing_in():
            output = module(*inputs)
        return output[0] if isinstance(output, tuple) else output

    return check(
        layer,
        [p.detach().clone().requires_grad_() for p in parameters],
        batches,
        waits=waits if isinstance(waits, bool) else [waits[name] for name in names],
    )
