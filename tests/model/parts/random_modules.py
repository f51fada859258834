"""Modules with random forwards of their own, made from a seed, and pipes of them with random settings.

A forward is a list of steps over the tensors that it has so far: units of several kinds, in lists, dicts and modules of
their own, and glue between them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, ROWS = 5, 24
Step = Callable[[Any, list[Tensor], Tensor], Sequence[Tensor]]


@dataclass
class Output:
    value: Tensor
    count: int
    nothing: None = None


class Dense(nn.Module):
    """Takes a mask if it is given one."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.inner, self.outer, self.drop = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(p)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.drop(torch.tanh(self.inner(x)))
        return x + self.outer(y if mask is None else y * mask)


class Joining(Dense):
    """From two tensors, in a dict, to two in a tuple."""

    def forward(self, both: dict[str, Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y = super().forward(both["first"])
        return y, y * both["second"]


class Wrapping(Dense):
    """Returns a dataclass with a number in it, or a dict."""

    def __init__(self, *, is_dict: bool) -> None:
        super().__init__()
        self.is_dict = is_dict

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        output = Output(super().forward(x), 2)
        return {"value": output.value, "count": 2, "nothing": None} if self.is_dict else output


class Listing(Dense):
    """Returns a list with its input, a view of it, something new, and what nobody reads."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        y = super().forward(x)
        return [x, x[:, : WIDTH - 1], [y, y * 2]]


class Classes(nn.Module):
    """Returns integers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).argmax(-1)


class Group(nn.Module):
    """A container inside of the model, with glue of its own."""

    def __init__(self, size: int, *, adds: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Dense() for _ in range(size))
        self.norm = nn.LayerNorm(WIDTH)
        self.adds = adds

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        first = x
        for layer in self.layers[: len(self.layers)]:
            x = layer(x, mask=keep)
        x = self.norm(x)
        return x + first if self.adds else x


class RandomModule(nn.Module):
    """A module whose forward is made from a seed.

    Attributes:
        rounds: whether glue computes with gradients, or a parameter is used by several units, so that the pipe may add
            the summands of a gradient in another order.
        draws: whether it draws random numbers.
        inputs: the names of what it takes beside `x` and `labels`.
        steps: each a function from this module, or a copy of it, the tensors so far and a mask to further tensors.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        choose = random.Random(seed)
        self.rounds = self.draws = False
        self.inputs = [name for name in ("second", "keep", "factor") if choose.random() < 0.5]
        self.units = nn.ModuleList()
        self.stem, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.full((WIDTH,), 0.9))
        self.register_buffer("offsets", torch.linspace(0, 1, WIDTH))
        self.returns = choose.choice(["dict", "tuple", "dataclass", "loss"])
        self.steps: list[Step] = []
        self.count = 1  # of the tensors that the forward has
        makers = [getattr(self, name) for name in dir(type(self)) if name.startswith("make_")]
        for _ in range(choose.randint(4, 12)):
            choose.choice(makers)(choose)
        while len(self.units) < 4:
            self.make_unit(choose)
        self.taken = sorted({self.count - 1, *(choose.randrange(self.count) for _ in range(choose.randint(0, 2)))})
        self.rounds |= len(self.taken) > 1

    def forward(
        self,
        x: Tensor,
        second: Tensor | None = None,
        keep: Tensor | None = None,
        factor: float = 1.0,
        *,
        labels: Tensor | None = None,
    ) -> Any:
        # What glue computes without gradients, each part computes again.
        mask = (x > 0).to(x.dtype) if keep is None else keep.to(x.dtype)
        values = [self.stem(x if second is None else x + second)]
        for step in self.steps:
            values += step(self, values, mask * factor)
        result = sum((values[each] for each in self.taken[1:]), values[self.taken[0]])
        if labels is None:
            return result
        loss = functional.mse_loss(result, labels)
        if self.returns == "loss":
            return loss
        if self.returns == "tuple":
            return loss, result, values[-1]
        return {"loss": loss, "states": [values[-1]]} if self.returns == "dict" else Result(loss, result)

    def some(self, choose: random.Random) -> int:
        """One of the tensors so far, often the last one."""
        return self.count - 1 if choose.random() < 0.7 else choose.randrange(self.count)

    def add(self, step: Step, gives: int = 1) -> None:
        self.steps.append(step)
        self.count += gives

    def unit(self, module: nn.Module) -> int:
        self.units.append(module)
        return len(self.units) - 1

    def add_unit(self, module: nn.Module, given: int) -> None:
        number = self.unit(module)
        self.add(lambda net, values, mask: [net.units[number](values[given])])

    def make_unit(self, choose: random.Random) -> None:
        p = 0.3 if choose.random() < 0.2 else 0.0
        self.draws |= p > 0
        self.add_unit(Dense(p), self.some(choose))

    def make_masked(self, choose: random.Random) -> None:
        number, given = self.unit(Dense()), self.some(choose)
        self.add(lambda net, values, mask: [net.units[number](values[given], mask)])

    def make_again(self, choose: random.Random) -> None:
        numbers = [number for number, unit in enumerate(self.units) if type(unit) is Dense]
        if numbers:
            self.rounds = True
            number, given = choose.choice(numbers), self.some(choose)
            self.add(lambda net, values, mask: [net.units[number](values[given])])

    def make_named(self, choose: random.Random) -> None:
        kinds = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3), nn.ReLU()]
        module, given = choose.choice(kinds), self.some(choose)
        self.draws |= isinstance(module, nn.Dropout)
        name = f"named{self.count}"
        self.add_module(name, module)
        self.add(lambda net, values, mask: [getattr(net, name)(values[given])])

    def make_joining(self, choose: random.Random) -> None:
        number, first, second = self.unit(Joining()), self.some(choose), self.some(choose)
        self.add(lambda net, values, mask: net.units[number]({"first": values[first], "second": values[second]}), 2)

    def make_wrapping(self, choose: random.Random) -> None:
        is_dict, counts = choose.random() < 0.5, choose.random() < 0.3
        self.rounds |= counts
        number, given = self.unit(Wrapping(is_dict=is_dict)), self.some(choose)

        def step(net: Any, values: Any, mask: Any) -> Any:
            output = net.units[number](values[given])
            output = Output(**output) if isinstance(output, dict) else output
            assert output.nothing is None
            return [output.value * output.count if counts else output.value]

        self.add(step)

    def make_group(self, choose: random.Random) -> None:
        adds, name, given = choose.random() < 0.3, f"group{self.count}", self.some(choose)
        self.rounds |= adds
        self.add_module(name, Group(choose.randint(1, 3), adds=adds))
        self.add(lambda net, values, mask: [getattr(net, name)(values[given], mask)])

    def make_listing(self, choose: random.Random) -> None:
        which = choose.randrange(4)
        self.rounds |= which < 3
        number, given = self.unit(Listing()), self.some(choose)

        def step(net: Any, values: Any, mask: Any) -> Any:
            got = net.units[number](values[given])
            same, view, inside = got
            got.clear()
            inside.append(inside.pop(0))
            ways = [
                lambda: same + inside[0],
                lambda: functional.pad(view, (0, 1)),
                lambda: inside[0] * net.scale,
                lambda: inside[1],
            ]
            return [ways[which]()]

        self.add(step)

    def make_classes(self, choose: random.Random) -> None:
        self.rounds = True
        number, words, given = self.unit(Classes()), self.unit(nn.Embedding(3, WIDTH)), self.some(choose)

        def step(net: Any, values: Any, mask: Any) -> Any:
            found = net.units[number](values[given])
            return [net.units[words](torch.where(found > 0, found, 1)) + values[given]]

        self.add(step)

    def make_ungraded(self, choose: random.Random) -> None:
        self.rounds = True
        number, given = self.unit(Dense()), self.some(choose)

        def step(net: Any, values: Any, mask: Any) -> Any:
            with torch.no_grad():
                y = net.units[number].forward(values[given])
            return [values[given] + y]

        self.add(step)

    def make_before_in_place(self, choose: random.Random) -> None:
        self.rounds = True
        first, second, given = self.unit(nn.Linear(WIDTH, WIDTH)), self.unit(nn.ReLU(inplace=True)), self.some(choose)

        def step(net: Any, values: Any, mask: Any) -> Any:
            y = net.units[first](values[given])
            return [y * 2, net.units[second](y)]

        self.add(step, 2)

    def make_tied(self, choose: random.Random) -> None:
        dense = [unit for unit in self.units if type(unit) is Dense]
        if len(dense) > 1:
            self.rounds = True
            dense[-1].outer.bias = dense[0].outer.bias

    def make_glue(self, choose: random.Random) -> None:
        kind = choose.choice(["residual", "scale", "dropout", "cat", "in_place", "detach", "tied", "offset"])
        self.rounds |= kind != "detach"
        self.draws |= kind == "dropout"
        one, other = self.some(choose), self.some(choose)

        def step(net: Any, values: Any, mask: Any) -> Any:
            x = values[one]
            ways = {
                "residual": lambda: x + values[other],
                "scale": lambda: x * net.scale,
                "dropout": lambda: functional.dropout(x, 0.3, net.training),
                "cat": lambda: torch.cat([x, values[other]], 1)[:, 1 : WIDTH + 1],
                "in_place": lambda: (x.clone() if one % 2 else x + 0).mul_(0.5),
                "detach": x.detach,
                "tied": lambda: functional.linear(x, net.stem.weight),
                "offset": lambda: x + net.offsets,
            }
            return [ways[kind]()]

        self.add(step)
        if kind == "detach":  # a unit behind it, so that the loss has a graph
            self.add_unit(Dense(), self.count - 1)


@dataclass
class Result:
    loss: Tensor
    result: Tensor


def batch_for(model: RandomModule, seed: int) -> dict[str, Any]:
    """A mini-batch."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)

    every = {"second": normal(), "keep": normal() > 0, "factor": 0.75}
    batch = {"x": normal(), **{name: every[name] for name in model.inputs}, "labels": normal()}
    names = random.Random(seed).sample(list(batch), len(batch))
    return {name: batch[name] for name in names}


def settings_for(groups: int, seed: int) -> dict[str, Any]:
    """Arguments of `attach` for a model with a number of groups of units."""
    choose = random.Random(seed)
    schedule = choose.choice(["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v"])
    twice = schedule in ("interleaved-1f1b", "zb-v")
    workers = choose.randint(1, max(1, min(3, groups // 2 if twice else groups)))
    stages = workers * (2 if twice else 1)
    cuts = sorted(choose.sample(range(1, groups), stages - 1))
    balance = [stop - start for start, stop in zip([0, *cuts], [*cuts, groups], strict=True)]
    return {
        "balance": balance,
        "devices": ["cpu"] * workers,
        "schedule": schedule,
        "chunks": choose.choice([2, 3, 4]) if schedule != "interleaved-1f1b" else workers * choose.choice([2, 3]),
        "checkpoint": choose.choice(["always", "except_last", "never"]),
    }
