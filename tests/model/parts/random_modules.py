"""Modules with random forwards of their own, made from a seed, and pipes of them with random settings.

A forward is a list of steps over the tensors that it has so far: units of several kinds, in lists, dicts and modules of
their own, and glue between them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, ROWS = 5, 24


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
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.choices = [random.Random(seed)]  # in a list: a dry run looks at plain attributes
        choose = self.choices[0]
        self.rounds = self.draws = False
        self.inputs = [name for name in ("second", "keep", "factor") if choose.random() < 0.5]
        self.units, self.named = nn.ModuleList(), nn.ModuleDict()
        self.stem, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.full((WIDTH,), 0.9))
        self.register_buffer("offsets", torch.linspace(0, 1, WIDTH))
        self.groups = 0
        self.returns = choose.choice(["dict", "tuple", "dataclass", "loss"])
        self.steps: list[tuple[Any, ...]] = []
        self.count = 1  # of the tensors that the forward has
        makers = [getattr(self, name) for name in dir(type(self)) if name.startswith("make_")]
        for _ in range(choose.randint(4, 12)):
            choose.choice(makers)()
        while len(self.units) < 4:
            self.make_unit()
        self.taken = sorted({self.count - 1, *(choose.randrange(self.count) for _ in range(choose.randint(0, 2)))})
        self.rounds |= len(self.taken) > 1
        del self.choices

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
        for kind, *rest in self.steps:
            values += getattr(self, f"run_{kind}")(values, mask * factor, *rest)
        result = sum((values[each] for each in self.taken[1:]), values[self.taken[0]])
        if labels is None:
            return result
        loss = functional.mse_loss(result, labels)
        if self.returns == "loss":
            return loss
        if self.returns == "tuple":
            return loss, result, values[-1]
        return {"loss": loss, "states": [values[-1]]} if self.returns == "dict" else Result(loss, result)

    def some(self) -> int:
        """One of the tensors so far, often the last one."""
        choose = self.choices[0]
        return self.count - 1 if choose.random() < 0.7 else choose.randrange(self.count)

    def add(self, kind: str, *rest: Any, gives: int = 1) -> None:
        self.steps.append((kind, *rest))
        self.count += gives

    def unit(self, module: nn.Module) -> int:
        self.units.append(module)
        return len(self.units) - 1

    def make_unit(self) -> None:
        p = 0.3 if self.choices[0].random() < 0.2 else 0.0
        self.draws |= p > 0
        self.add("unit", self.unit(Dense(p)), self.some(), self.choices[0].random() < 0.5)

    def run_unit(self, values: Any, mask: Any, number: int, given: int, is_masked: bool) -> Any:
        return [self.units[number](values[given], mask) if is_masked else self.units[number](values[given])]

    def make_again(self) -> None:
        numbers = [number for number, unit in enumerate(self.units) if type(unit) is Dense]
        if numbers:
            self.rounds = True
            self.add("unit", self.choices[0].choice(numbers), self.some(), False)

    def make_named(self) -> None:
        name = f"unit{len(self.named)}"
        self.named[name] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.add("named", name, self.some())

    def run_named(self, values: Any, mask: Any, name: str, given: int) -> Any:
        return [self.named[name](values[given])]

    def make_joining(self) -> None:
        self.add("joining", self.unit(Joining()), self.some(), self.some(), gives=2)

    def run_joining(self, values: Any, mask: Any, number: int, first: int, second: int) -> Any:
        return self.units[number]({"first": values[first], "second": values[second]})

    def make_wrapping(self) -> None:
        is_dict, counts = self.choices[0].random() < 0.5, self.choices[0].random() < 0.3
        self.rounds |= counts
        self.add("wrapping", self.unit(Wrapping(is_dict=is_dict)), self.some(), counts)

    def run_wrapping(self, values: Any, mask: Any, number: int, given: int, counts: bool) -> Any:
        output = self.units[number](values[given])
        output = Output(**output) if isinstance(output, dict) else output
        assert output.nothing is None
        return [output.value * output.count if counts else output.value]

    def make_group(self) -> None:
        name, adds = f"group{self.groups}", self.choices[0].random() < 0.3
        self.groups += 1
        self.rounds |= adds
        setattr(self, name, Group(self.choices[0].randint(1, 3), adds=adds))
        self.add("group", name, self.some())

    def run_group(self, values: Any, mask: Any, name: str, given: int) -> Any:
        return [getattr(self, name)(values[given], mask)]

    def make_listing(self) -> None:
        which = self.choices[0].randrange(4)
        self.rounds |= which < 3
        self.add("listing", self.unit(Listing()), self.some(), which)

    def run_listing(self, values: Any, mask: Any, number: int, given: int, which: int) -> Any:
        got = self.units[number](values[given])
        same, view, inside = got
        got.clear()
        inside.append(inside.pop(0))
        if which == 0:
            return [same + inside[0]]
        if which == 1:
            return [functional.pad(view, (0, 1))]
        return [inside[0] * self.scale if which == 2 else inside[1]]

    def make_classes(self) -> None:
        self.rounds = True
        self.add("classes", self.unit(Classes()), self.unit(nn.Embedding(3, WIDTH)), self.some())

    def run_classes(self, values: Any, mask: Any, number: int, words: int, given: int) -> Any:
        found = self.units[number](values[given])
        return [self.units[words](torch.where(found > 0, found, 1)) + values[given]]

    def make_ungraded(self) -> None:
        self.rounds = True
        self.add("ungraded", self.unit(Dense()), self.some())

    def run_ungraded(self, values: Any, mask: Any, number: int, given: int) -> Any:
        with torch.no_grad():
            y = self.units[number].forward(values[given])
        return [values[given] + y]

    def make_before_in_place(self) -> None:
        self.rounds = True
        first = self.unit(nn.Linear(WIDTH, WIDTH))
        self.add("before_in_place", first, self.name_of(nn.ReLU(inplace=True)), self.some(), gives=2)

    def run_before_in_place(self, values: Any, mask: Any, first: int, name: str, given: int) -> Any:
        y = self.units[first](values[given])
        before = y * 2
        return [before, self.named[name](y)]

    def make_norm(self) -> None:
        self.add("named", self.name_of(nn.BatchNorm1d(WIDTH)), self.some())

    def make_relu(self) -> None:
        first = self.unit(nn.Linear(WIDTH, WIDTH))
        self.add("unit", first, self.some(), False)
        self.add("named", self.name_of(nn.ReLU()), self.count - 1)

    def make_dropout(self) -> None:
        self.draws = True
        self.add("named", self.name_of(nn.Dropout(0.3)), self.some())

    def name_of(self, module: nn.Module) -> str:
        name = f"unit{len(self.named)}"
        self.named[name] = module
        return name

    def make_glue(self) -> None:
        kind = self.choices[0].choice(
            ["residual", "scale", "dropout", "cat", "in_place", "detach", "tied", "offset", "tied_parameter"]
        )
        self.rounds |= kind != "detach"
        self.draws |= kind == "dropout"
        if kind == "tied_parameter":
            dense = [unit for unit in self.units if type(unit) is Dense]
            if len(dense) > 1:
                dense[-1].outer.bias = dense[0].outer.bias
            return
        self.add("glue", kind, self.some(), self.some())
        if kind == "detach":  # a unit behind it, so that the loss has a graph
            self.add("unit", self.unit(Dense()), self.count - 1, False)

    def run_glue(self, values: Any, mask: Any, kind: str, one: int, other: int) -> Any:
        x = values[one]
        ways = {
            "residual": lambda: x + values[other],
            "scale": lambda: x * self.scale,
            "dropout": lambda: functional.dropout(x, 0.3, self.training),
            "cat": lambda: torch.cat([x, values[other]], 1)[:, 1 : WIDTH + 1],
            "in_place": lambda: (x.clone() if one % 2 else x + 0).mul_(0.5),
            "detach": x.detach,
            "tied": lambda: functional.linear(x, self.stem.weight),
            "offset": lambda: x + self.offsets,
        }
        return [ways[kind]()]


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
