"""Models trained by torchgpipe and fairscale themselves, and by the adapters: everything that comes out is equal.

Everything is equal to the last bit, since the adapters add gradients from the last micro-batch to the first, too. Only
a weight that is in two layers gets several gradients of each micro-batch, which the originals may add in another order.

Running statistics are those that the originals have without checkpointing: with it they count recomputations, too.
"""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Fork(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, 2 * x


class Join(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        a, b = pair
        return a + b


class Both(nn.Module):
    """A layer for each tensor of a pair."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left = nn.Linear(width, width)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.left(pair[0])), pair[1]


class Tied(nn.Module):
    """A layer whose weight is that of another."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = layer.weight
        self.bias = nn.Parameter(torch.zeros(len(layer.weight)))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def skippables(library: Any) -> tuple[Callable[[str], nn.Module], Callable[[str], nn.Module]]:
    """Layers that stash their input under a name, and that add what was stashed."""

    def stash(name: str) -> nn.Module:
        skip = library.module("skip")

        class Stash(nn.Module):
            def forward(self, x: Tensor) -> Any:
                yield skip.stash(name, x)
                return -x

        return skip.skippable(stash=[name])(Stash)()

    def pop(name: str) -> nn.Module:
        skip = library.module("skip")

        class Pop(nn.Module):
            def forward(self, x: Tensor) -> Any:
                return x + (yield skip.pop(name))

        return skip.skippable(pop=[name])(Pop)()

    return stash, pop


def blocks(library: Any, width: int) -> dict[str, Callable[[], list[nn.Module]]]:
    """What a model is made of: rows of layers from `width` numbers to `width` numbers."""
    stash, pop = skippables(library)
    names = map(str, itertools.count())

    def skip(*between: nn.Module) -> list[nn.Module]:
        name = next(names)
        return [stash(name), *between, pop(name)]

    def tied() -> list[nn.Module]:
        layer = nn.Linear(width, width)
        return [layer, nn.Tanh(), Tied(layer)]

    return {
        "linear": lambda: [nn.Linear(width, width)],
        "convolution": lambda: [
            nn.Unflatten(1, (1, width)),
            nn.Conv1d(1, 2, 3, padding=1),
            nn.AvgPool1d(2),
            nn.Flatten(),
        ],
        "batch norm": lambda: [nn.Linear(width, width), nn.BatchNorm1d(width)],
        "cumulative batch norm": lambda: [nn.BatchNorm1d(width, momentum=None)],
        "in place": lambda: [nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True))],
        "no parameters": lambda: [nn.Identity(), nn.Tanh(), nn.GELU()],
        "no dropout": lambda: [nn.Dropout(0.0)],
        "dropout in evaluation mode": lambda: [nn.Dropout(0.5).eval()],
        "frozen": lambda: [nn.Linear(width, width).requires_grad_(False)],
        "skip": lambda: skip(nn.Linear(width, width)),
        "nested skips": lambda: skip(nn.Tanh(), *skip(nn.Linear(width, width)), nn.Tanh()),
        "tuple": lambda: [Fork(), Both(width), Join()],
        "tied": tied,
    }


def random_model(library: Any, dice: random.Random) -> tuple[nn.Sequential, list[int]]:
    """A model, and how it is cut."""
    width = dice.choice([4, 6])
    kinds = blocks(library, width)
    rows = [kinds[dice.choice(list(kinds))]() for _ in range(dice.randint(1, 4))]
    model = nn.Sequential(*itertools.chain(*rows), nn.Linear(width, 3))
    cuts = sorted(dice.sample(range(1, len(model)), dice.randint(0, min(3, len(model) - 1))))
    return model, [end - start for start, end in itertools.pairwise([0, *cuts, len(model)])]


def random_training(library: Any, seed: int, checkpoint: str) -> dict[str, Any]:
    """Two steps of training of a random model on batches of random sizes."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    model, balance = random_model(library, dice)
    chunks = dice.randint(1, 5)
    batches = [torch.randn(dice.choice([1, 2, 3, 6, 7, 8, 12]), model[-1].in_features) for _ in range(2)]
    return trained(library.pipe(model.double(), balance, chunks, checkpoint), batches)


def trained(pipe: Any, batches: list[Tensor]) -> dict[str, Any]:
    """Trains a pipe for a step with each batch, and returns all that can be seen of it."""
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    seen: dict[str, Any] = {}
    for step, batch in enumerate(batches):
        x = batch.double().requires_grad_()
        optimizer.zero_grad()
        output = pipe(x)
        output.square().mean().backward()
        seen |= {f"output {step}": output.detach(), f"input gradient {step}": x.grad}
        for name, parameter in pipe.named_parameters():
            seen[f"gradient {step} of {name}"] = None if parameter.grad is None else parameter.grad.clone()
        optimizer.step()
    uses = sum(len(list(layer.parameters())) for layer in pipe)
    return {
        "seen": seen,
        "parameters": {name: parameter.detach() for name, parameter in pipe.named_parameters()},
        "buffers": dict(pipe.named_buffers()),
        "names": list(pipe.state_dict()),
        "pieces": max(len(batch.chunk(pipe.chunks)) for batch in batches),
        "tied": uses > len(list(pipe.parameters())),
        "optimizer": optimizer.state_dict()["param_groups"],
    }


def assert_alike(mine: Any, original: Any, without_recomputation: Any) -> None:
    """See the top of the file."""
    if not isinstance(original, dict):  # both have failed
        assert mine == original
        return
    assert isinstance(mine, dict), mine
    for what in ("names", "pieces", "tied", "optimizer"):
        assert mine[what] == original[what]
    all_exact = not original["tied"]
    for what, expected in (
        ("seen", original["seen"]),
        ("parameters", original["parameters"]),
        ("buffers", without_recomputation["buffers"]),
    ):
        assert list(mine[what]) == list(expected)
        for name, tensor in expected.items():
            exact = all_exact or name in ("output 0", "input gradient 0")
            tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-9, "atol": 1e-12}
            torch.testing.assert_close(
                mine[what][name], tensor, **tolerance, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("seed", range(12))
def test_random_models(
    ask: Callable[..., Any], both: Callable[..., tuple[Any, Any]], seed: int, checkpoint: str
) -> None:
    original, mine = both(random_training, seed, checkpoint)
    assert_alike(mine, original, ask(random_training, seed, "never"))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(12, 512, 50))
def test_many_random_models(
    ask: Callable[..., Any], both: Callable[..., tuple[Any, Any]], first: int, checkpoint: str
) -> None:
    for seed in range(first, first + 50):
        print("seed", seed)
        test_random_models(ask, both, seed, checkpoint)


def test_most_of_the_random_models_can_be_trained(both: Callable[..., tuple[Any, Any]]) -> None:
    """The others fail in both, as a batch norm does that sees a single row."""
    assert sum(isinstance(both(random_training, seed, "never")[1], dict) for seed in range(12)) >= 8


def subclass_training(library: Any, checkpoint: str) -> list[Any]:
    """A subclass of the pipe has a head of its own."""

    class WithHead(library.Pipe):
        def __init__(self) -> None:
            layers = nn.Sequential(nn.Embedding(9, 4), nn.Tanh()).double()
            super().__init__(layers, [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint)
            self.head = nn.Linear(4, 2).double()

        def forward(self, input: Tensor) -> Tensor:
            return self.head(super().forward(input))

    torch.manual_seed(0)
    pipe = WithHead()
    pipe(torch.arange(12).view(4, 3) % 7).square().sum().backward()
    return [list(pipe.state_dict()), *(parameter.grad.tolist() for parameter in pipe.parameters())]


def test_a_subclass_with_a_head(both: Callable[..., tuple[Any, Any]], checkpoint: str) -> None:
    original, mine = both(subclass_training, checkpoint)
    assert mine == original
    assert mine[0][-1] == "head.bias"


def hooked_training(library: Any, chunks: int, checkpoint: str) -> dict[str, Tensor]:
    """Forward hooks put the scale of an input on a stack of their layer, which backward hooks take off again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    for layer in (model[0], model[2]):
        stack: list[Tensor] = []

        def put(layer: nn.Module, inputs: tuple[Tensor], output: Tensor, stack: list[Tensor] = stack) -> None:
            stack.append(inputs[0].detach().abs().mean())

        def take(layer: nn.Module, gradients: Any, output: Any, stack: list[Tensor] = stack) -> tuple[Tensor]:
            return (gradients[0] / stack.pop(),)

        layer.register_forward_hook(put)
        layer.register_full_backward_hook(take)
    pipe = library.pipe(model, [2, 1], chunks, checkpoint)
    x = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    pipe(x).square().sum().backward()
    return {"x": x.grad} | {name: parameter.grad for name, parameter in pipe.named_parameters()}


@pytest.mark.parametrize("chunks", [2, 4])
def test_hooks_that_go_in_pairs(
    both: Callable[..., tuple[Any, Any]], ask: Callable[..., Any], name: str, chunks: int, checkpoint: str
) -> None:
    """Last in, first out: that depends on the order of backwards. fairscale has this order without checkpointing."""
    original, mine = both(hooked_training, chunks, checkpoint)
    if name == "fairscale":
        original = ask(hooked_training, chunks, "never")
    assert list(mine) == list(original)
    assert all(torch.equal(mine[name], original[name]) for name in original)


def deferred_training(library: Any, checkpoint: str, momentum: float | None) -> list[dict[str, Tensor]]:
    """The statistics of deferred batch norms after each of three steps, in sizes that the originals count, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=momentum), nn.Tanh(), nn.BatchNorm1d(4)).double()
    pipe = library.pipe(model, [2, 2], 3, checkpoint, deferred_batch_norm=True)
    seen = []
    for batch in [torch.randn(rows, 4, dtype=torch.float64) for rows in (6, 12, 9)]:
        pipe(batch).square().sum().backward()
        seen.append({name: buffer.clone() for name, buffer in pipe.named_buffers() if "sum" not in name})
    return seen


@pytest.mark.parametrize("momentum", [0.1, None])
def test_deferred_batch_norms(both: Callable[..., tuple[Any, Any]], checkpoint: str, momentum: float | None) -> None:
    """The originals' variance is that of all rows divided by their number, n; here it is divided by n - 1."""
    original, mine = both(deferred_training, checkpoint, momentum)
    assert [list(buffers) for buffers in mine] == [list(buffers) for buffers in original]
    for step in range(3):
        for name, expected in original[step].items():
            if not name.endswith("running_var"):
                torch.testing.assert_close(mine[step][name], expected)
    for name in ("partitions.0.1.running_var", "partitions.1.3.running_var"):
        weight = 1.0 if momentum is None and "0.1" in name else 0.1  # of the first mini-batch; before it there was a 1
        biased = (original[0][name] - (1 - weight)) / weight
        torch.testing.assert_close(mine[0][name], (1 - weight) + weight * biased * 6 / 5)
