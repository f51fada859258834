"""Questions to which torchgpipe and fairscale give the same answer as their adapters: refusals, odd inputs, settings.

Where the answer differs the question stands in `tests/compat/test_differences.py`.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

CHECKPOINT_MODES = ("never", "except_last", "always")


class Say(nn.Module):
    """Calls a function with its one argument."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, argument: Any) -> Any:
        return self.function(argument)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))


def twice() -> nn.Sequential:
    layer = nn.Linear(2, 2)
    return nn.Sequential(layer, nn.ReLU(), layer)


def tied() -> nn.Sequential:
    module = layers()
    module[2].weight = module[0].weight
    return module


def outcome(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        return (type(error).__name__, str(error))


def first_line(function: Callable[[], Any]) -> str:
    """Of a message; the advice below it is put differently."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        function()
    return str(caught.value).partition("\n")[0]


def plain(value: Any) -> Any:
    """Tensors as lists, to be compared with ==."""
    if isinstance(value, Tensor):
        return (str(value.dtype), value.tolist())
    return [type(value).__name__, *map(plain, value)] if isinstance(value, tuple | list) else value


# What is asked: by name, a function of a library.

CONSTRUCTED = {
    "chunks 0": lambda library: library.pipe(layers(), [3], 0),
    "chunks -1": lambda library: library.pipe(layers(), [3], -1),
    "chunks 'x'": lambda library: library.pipe(layers(), [3], "x"),
    "chunks None": lambda library: library.pipe(layers(), [3], None),
    "chunks '4'": lambda library: repr(library.pipe(layers(), [3], "4").chunks),
    "chunks 2.7": lambda library: repr(library.pipe(layers(), [3], 2.7).chunks),
    "chunks True": lambda library: repr(library.pipe(layers(), [3], True).chunks),
    "checkpoint 'x'": lambda library: library.pipe(layers(), [3], 1, "x"),
    "checkpoint None": lambda library: library.pipe(layers(), [3], 1, None),
    "chunks and checkpoint": lambda library: library.pipe(layers(), [3], 0, "x"),
    "checkpoint and module": lambda library: library.pipe(None, [3], 1, "x"),
    "no sequence": lambda library: library.pipe(nn.Linear(1, 1), [1]),
    "a list": lambda library: library.pipe([nn.Linear(1, 1)], [1]),
    "no sequence and a wrong balance": lambda library: library.pipe(nn.ModuleList([nn.ReLU()]), [5]),
    "a layer twice": lambda library: library.pipe(twice(), [1, 2]),
    "a layer twice and a wrong balance": lambda library: library.pipe(twice(), [5]),
    "tied weights": lambda library: list(library.pipe(tied(), [1, 2]).state_dict()),
    "no balance": lambda library: first_line(lambda: library.Pipe(None)),
    "a small balance": lambda library: first_line(lambda: library.pipe(layers(), [1])),
    "a large balance": lambda library: first_line(lambda: library.pipe(layers(), [1, 5])),
    "a zero in the balance": lambda library: first_line(lambda: library.pipe(layers(), [0, 3])),
    "a negative balance": lambda library: first_line(lambda: library.pipe(layers(), [-1, 4])),
    "a balance of nothing": lambda library: first_line(lambda: library.pipe(nn.Sequential(), [1])),
    "a wrong balance and too few devices": lambda library: first_line(
        lambda: library.Pipe(layers(), [1, 1, 2], devices=["cpu"])
    ),
    "a number as balance": lambda library: library.Pipe(layers(), 3, devices=["cpu"]),
    "a balance of floats": lambda library: library.Pipe(layers(), [1.0, 2.0], devices=["cpu"] * 2).balance,
    "a balance of halves": lambda library: first_line(lambda: library.Pipe(layers(), [0.5, 2], devices=["cpu"] * 2)),
    "text as balance": lambda library: library.Pipe(layers(), "12", devices=["cpu"]),
    "too few devices": lambda library: library.Pipe(layers(), [1, 1, 1], devices=["cpu"]),
    "an empty list of devices": lambda library: library.Pipe(layers(), [1, 1, 1], devices=[]),
    "an unknown device": lambda library: library.Pipe(layers(), [3], devices=["bogus"]),
    "kinds of devices": lambda library: str(
        library.Pipe(layers(), iter((1, 2)), devices=iter([torch.device("cpu"), "cpu:0"])).devices
    ),
    "further devices": lambda library: str(library.Pipe(layers(), (1, 2), devices=["cpu"] * 5).devices),
    "layers on other devices": lambda library: [
        str(parameter.device)
        for parameter in library.Pipe(
            nn.Sequential(nn.Linear(1, 1, device="meta"), nn.Linear(1, 1)), [1, 1], devices=["meta", "cpu"]
        ).parameters()
    ],
    "names that the pipe has, too": lambda library: list(
        library.pipe(
            nn.Sequential(OrderedDict(chunks=nn.Linear(1, 1), devices=nn.ReLU(), partitions=nn.Linear(1, 1))), [2, 1]
        ).state_dict()
    ),
    "skips that do not match": lambda library: library.pipe(nn.Sequential(skippable(library, ["a"], [])), [1]),
    "a forward of the sequence's own": lambda library: plain(library.pipe(AddsOne(nn.Identity()), [1])(torch.zeros(1))),
    "a forward of a nested sequence's own": lambda library: plain(
        library.pipe(nn.Sequential(AddsOne(nn.Identity())), [1])(torch.zeros(1))
    ),
    "an empty sequence": lambda library: empty(library),
}


class AddsOne(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def empty(library: Any) -> list[Any]:
    pipe = library.Pipe(nn.Sequential(), [], devices=["cpu"])
    return [
        len(pipe),
        pipe.devices,
        pipe.balance,
        list(pipe.partitions),
        plain(pipe(torch.ones(2))),
        plain(pipe((torch.ones(1),))),
        outcome(lambda: pipe(3)),
    ]


def skippable(library: Any, stash: list[str], pop: list[str], namespace: Any = None) -> nn.Module:
    layer = library.module("skip").skippable(stash=stash, pop=pop)(nn.Identity)()
    return layer if namespace is None else layer.isolate(namespace)


MADE = {
    "names": lambda pipe: [
        [name for name, _ in names()] for names in (pipe.named_modules, pipe.named_children, pipe.named_parameters)
    ],
    "state dict with a prefix": lambda pipe: list(pipe.state_dict(prefix="model.")),
    "a state dict of the module": lambda pipe: pipe.load_state_dict(layers().state_dict()),
    "layers": lambda pipe: [len(pipe), [str(layer) for layer in pipe], [str(pipe[index]) for index in range(-3, 3)]],
    "beyond": lambda pipe: [outcome(lambda index=index: pipe[index])[0] for index in (3, -4)],
    "by name": lambda pipe: outcome(lambda: pipe["0"])[0],
    "cuda": lambda pipe: pipe.cuda(),
    "cuda 0": lambda pipe: pipe.cuda(0),
    "cpu": lambda pipe: pipe.cpu(),
    "to a device": lambda pipe: pipe.to(torch.device("cpu")),
    "to a name": lambda pipe: pipe.to("cpu", torch.float64),
    "to an index": lambda pipe: pipe.to(0),
    "to a tensor": lambda pipe: pipe.to(torch.ones(1)),
    "to device=": lambda pipe: pipe.to(device="cpu"),
    "to device=None": lambda pipe: pipe.to(device=None, dtype=torch.float64),
    "to tensor=": lambda pipe: pipe.to(tensor=torch.ones(1)),
    "to a dtype": lambda pipe: str(pipe.to(torch.float64)[0].weight.dtype),
    "to dtype=": lambda pipe: str(pipe.to(dtype=torch.float64)[0].weight.dtype),
    "half": lambda pipe: str(pipe.half()[2].weight.dtype),
    "double returns the pipe": lambda pipe: pipe.double() is pipe,
    "flags": lambda pipe: [[module.training for module in mode.modules()] for mode in (pipe.eval(), pipe.train())],
    "text": lambda pipe: pipe("a"),
    "None": lambda pipe: pipe(None),
    "a list": lambda pipe: pipe([torch.ones(2, 2)]),
    "a tuple with a number": lambda pipe: pipe((torch.ones(2, 2), 1)),
    "by keyword": lambda pipe: list(pipe(input=torch.ones(3, 2)).shape),
    "a tuple for a layer that takes a tensor": lambda pipe: pipe((torch.ones(2, 2),)),
    "no dimension": lambda pipe: pipe(torch.tensor(1.0)),
    "no rows": lambda pipe: list(pipe(torch.ones(0, 2)).shape),
    "wrong rows": lambda pipe: pipe(torch.ones(2, 3)),
    "without gradients": lambda pipe: no_grad(pipe),
    "in inference mode": lambda pipe: inference(pipe),
    "two forwards, two backwards": lambda pipe: two_forwards(pipe),
    "a frozen layer": lambda pipe: [pipe[0].requires_grad_(False) and None, backward(pipe)],
    "an output is overwritten": lambda pipe: backward(pipe, lambda output: output.mul_(2)),
    "a partition in evaluation mode": lambda pipe: [pipe.partitions[0].eval() and None, backward(pipe)],
    "other settings later": lambda pipe: [
        setattr(pipe, "balance", [2, 1]),
        setattr(pipe, "devices", [torch.device("cpu")] * 3),
        backward(pipe),
    ],
    "fewer chunks later": lambda pipe: [backward(pipe), setattr(pipe, "chunks", 1), backward(pipe)],
    "another layer in a partition": lambda pipe: [
        backward(pipe),
        setattr(pipe.partitions[1], "1", nn.ReLU()),
        backward(pipe),
    ],
}


def backward(pipe: Any, change: Callable[[Tensor], Tensor] = lambda output: output) -> list[Any]:
    pipe.zero_grad()
    x = torch.ones(4, 2, requires_grad=True)
    change(pipe(x)).square().sum().backward()
    return [plain(parameter.grad) for parameter in (x, *pipe.parameters())]


def no_grad(pipe: Any) -> bool:
    with torch.no_grad():
        return pipe(torch.ones(4, 2)).requires_grad


def inference(pipe: Any) -> bool:
    with torch.inference_mode():
        return pipe(torch.ones(4, 2)).is_inference()


def two_forwards(pipe: Any) -> list[Any]:
    first, second = pipe(torch.ones(4, 2)), pipe(2 * torch.ones(4, 2))
    second.sum().backward()
    first.sum().backward()
    return [plain(parameter.grad) for parameter in pipe.parameters()]


RETURNED = {
    "a pair": lambda x: (x, 2 * x),
    "a tuple of one": lambda x: (x,),
    "whole numbers": lambda x: x.long(),
    "a pair of which one is detached": lambda x: (x, x.detach()),
    "the tensor itself twice": lambda x: (x, x),
    "something of another size": lambda x: x.repeat(2, 1),
}

PASSED_ON = {
    "a pair": (lambda x: (x, 2 * x), lambda pair: pair[0] * pair[1]),
    "a list": (lambda x: [x, 2 * x], lambda pair: pair[0] * pair[1]),
    "a tuple of one": (lambda x: (x,), lambda single: 3 * single[0]),
    "a pair with whole numbers": (lambda x: (x, x.long()), lambda pair: pair[0] * pair[1]),
}

VERIFIED = {
    "a pair": [(["a"], []), ([], ["a"])],
    "no pop": [(["a"], [])],
    "no stash": [([], ["a"])],
    "the wrong order": [([], ["a"]), (["a"], [])],
    "both at once": [(["a"], ["a"])],
    "both at once in between": [(["a"], []), (["a"], ["a"]), ([], ["a"])],
    "namespaces": [(["a"], [], 1), (["a"], [], 2), ([], ["a"], 2), ([], ["a"], 1)],
    "other namespaces": [(["a"], [], 1), ([], ["a"], 2)],
    "several faults": [(["a"], ["b"]), ([], ["c", "c"]), ([], ["a"])],
}

YIELDED = {
    "as declared": (lambda stash: [stash("a", torch.ones(1))], lambda pop: [pop("a")]),
    "None": (lambda stash: [stash("a", None)], lambda pop: [pop("a")]),
    "an undeclared stash": (lambda stash: [stash("a", None), stash("b", None)], lambda pop: [pop("a")]),
    "no stash": (lambda stash: [], lambda pop: [pop("a")]),
    "an undeclared pop": (lambda stash: [stash("a", None)], lambda pop: [pop("b")]),
    "no pop": (lambda stash: [stash("a", None)], lambda pop: []),
    "a number": (lambda stash: [5], lambda pop: [pop("a")]),
}


def yielding(library: Any, what: str, inside: bool) -> Any:
    """Two skippable layers, in a pipe or by themselves."""
    skip = library.module("skip")
    stashes, pops = YIELDED[what]

    class Stash(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield from stashes(skip.stash)
            return x

    class Pop(nn.Module):
        def forward(self, x: Tensor) -> Any:
            popped = []
            for command in pops(skip.pop):
                popped.append((yield command))
            return x if popped[0] is None else x + popped[0]

    module = nn.Sequential(skip.skippable(stash=["a"])(Stash)(), nn.Tanh(), skip.skippable(pop=["a"])(Pop)())
    return plain((library.pipe(module, [1, 1, 1], 2, "always") if inside else module)(torch.ones(4, 1)))


def verified(library: Any, what: str) -> None:
    skip = library.module("skip")
    namespaces = {number: skip.Namespace() for number in (1, 2)}
    layers = [skippable(library, stash, pop, *map(namespaces.get, rest)) for stash, pop, *rest in VERIFIED[what]]
    return skip.verify_skippables(nn.Sequential(*layers))


BALANCED = {
    "a tuple": lambda by_time: by_time(1, nn.Sequential(Say(sum)), (torch.ones(4, 2), torch.ones(4, 2))),
    "no partitions": lambda by_time: outcome(lambda: by_time(0, layers(), torch.ones(4, 2)))[0],
    "too many": lambda by_time: outcome(lambda: by_time(4, layers(), torch.ones(4, 2)))[0],
    "no layers": lambda by_time: outcome(lambda: by_time(1, nn.Sequential(), torch.ones(4, 2)))[0],
    "layers that do not fit": lambda by_time: by_time(
        1, nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 2)), torch.ones(4, 2)
    ),
    "in evaluation mode": lambda by_time: evaluated(by_time),
    "after a backward": lambda by_time: after_backward(by_time),
}


def evaluated(by_time: Callable[..., list[int]]) -> list[Any]:
    module = nn.Sequential(nn.BatchNorm1d(2)).eval()
    return [by_time(1, module, torch.ones(4, 2)), module[0].training, module[0].num_batches_tracked.item()]


def after_backward(by_time: Callable[..., list[int]]) -> tuple[str, bool]:
    module = layers()
    module(torch.ones(4, 2)).sum().backward()
    error, message = outcome(lambda: by_time(1, module, torch.ones(4, 2)))
    return error, message.startswith("some parameter already has gradient")


def flags(library: Any, checkpoint: str, training: bool, rows: int) -> list[Any]:
    """What a layer is told of checkpointing, for each micro-batch and recomputation."""
    package = library.module("checkpoint")
    seen: list[tuple[bool, bool, int]] = []
    see = Say(lambda x: (seen.append((package.is_checkpointing(), package.is_recomputing(), len(x))), x * 1)[1])
    pipe = library.pipe(nn.Sequential(see), [1], 4, checkpoint).train(training)
    output = pipe(torch.ones(rows, 2, requires_grad=True))
    first = sorted(seen)
    seen.clear()
    output.sum().backward()
    return [first, sorted(seen), package.is_checkpointing(), package.is_recomputing()]


def failing(library: Any, checkpoint: str) -> list[Any]:
    """A layer's exception, whether it is the object itself, and what the pipe does afterwards."""
    error = ZeroDivisionError("mine")
    layer = Say(lambda x: x if works else fail(error))
    works = False
    pipe = library.pipe(nn.Sequential(nn.Linear(2, 2), layer, nn.Linear(2, 2)), [1, 1, 1], 2, checkpoint)
    answers = [outcome(lambda: pipe(torch.ones(4, 2)))]
    with pytest.raises(ZeroDivisionError) as caught:
        pipe(torch.ones(4, 2))
    works = True
    return [*answers, caught.value is error, list(pipe(torch.ones(4, 2)).shape)]


def fail(error: Exception) -> None:
    raise error


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ZeroDivisionError("backward")


def failing_backward(library: Any, checkpoint: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2), Say(FailsBackward.apply))
    library.pipe(module, [1, 1], 2, checkpoint)(torch.ones(4, 2)).sum().backward()


def hooks(library: Any, where: str) -> list[str]:
    """How often hooks are called that stand in several places."""
    seen: list[str] = []
    module = layers()
    module.register_forward_hook(lambda *_: seen.append("module"))
    pipe = library.pipe(module, [1, 2], 2)
    place = {"pipe": pipe, "list": pipe.partitions, "layer": pipe[0]}[where]
    place.register_forward_pre_hook(lambda *_: seen.append("before"))
    place.register_forward_hook(lambda *_: seen.append("after"))
    place.register_full_backward_hook(lambda *_: seen.append("backward"))
    pipe(torch.ones(4, 2, requires_grad=True)).sum().backward()
    return seen


# How it is asked.


def constructed(library: Any, what: str) -> Any:
    answer = CONSTRUCTED[what](library)
    return None if isinstance(answer, nn.Module) else answer


def made(library: Any, what: str) -> Any:
    answer = MADE[what](library.pipe(layers(), [1, 2], 2, "except_last"))
    return None if isinstance(answer, nn.Module | Tensor) else answer


def returned(library: Any, what: str, checkpoint: str) -> Any:
    pipe = library.pipe(nn.Sequential(nn.Linear(2, 2), Say(RETURNED[what])), [1, 1], 2, checkpoint)
    x = torch.arange(8.0).view(4, 2).requires_grad_()
    output = pipe(x)
    tensors = [tensor for tensor in (output if isinstance(output, tuple) else (output,)) if tensor.is_floating_point()]
    if what != "whole numbers":
        tensors[0].sum().backward()
    return [plain(output), plain(x.grad)]


def passed_on(library: Any, what: str, checkpoint: str) -> Any:
    give, take = PASSED_ON[what]
    pipe = library.pipe(nn.Sequential(nn.Linear(2, 2), Say(give), Say(take)), [1, 1, 1], 2, checkpoint)
    x = torch.arange(8.0).view(4, 2).requires_grad_()
    output = pipe(x)
    output.sum().backward()
    return [plain(output), plain(x.grad), plain(pipe[0].weight.grad)]


def balanced(library: Any, what: str) -> Any:
    by_time = library.module("balance").balance_by_time
    return BALANCED[what](lambda *arguments: by_time(*arguments, device="cpu", timeout=0.1))


def split(library: Any, rows: tuple[int, ...], chunks: int) -> Any:
    """Tensors of several numbers of rows, which are cut into equally many pieces."""
    seen: list[list[int]] = []
    see = Say(lambda tensors: (seen.append([len(tensor) for tensor in tensors]), tensors[0])[1])
    library.pipe(nn.Sequential(see), [1], chunks)(tuple(torch.zeros(each) for each in rows))
    return seen


QUESTIONS = [
    *((constructed, what) for what in CONSTRUCTED),
    *((made, what) for what in MADE),
    *((returned, *case) for case in itertools.product(RETURNED, ["never"])),
    *((passed_on, *case) for case in itertools.product(PASSED_ON, ["never"])),
    *((passed_on, "a pair", checkpoint) for checkpoint in CHECKPOINT_MODES[1:]),
    *((verified, what) for what in VERIFIED),
    *((yielding, *case) for case in itertools.product(YIELDED, [False, True])),
    *((balanced, what) for what in BALANCED),
    *((flags, checkpoint, training, 4) for checkpoint in CHECKPOINT_MODES for training in (False, True)),
    *((flags, "always", True, rows) for rows in (2, 9)),
    *((failing, checkpoint) for checkpoint in CHECKPOINT_MODES),
    *((failing_backward, checkpoint) for checkpoint in CHECKPOINT_MODES),
    *((hooks, where) for where in ("pipe", "list", "layer")),
    *((split, *case) for case in itertools.product([(9,), (9, 9), (3, 9), (4, 2), (7, 8)], [1, 3])),
]


@pytest.mark.parametrize(
    "question", QUESTIONS, ids=lambda question: " ".join(map(str, [question[0].__name__, *question[1:]]))
)
def test_the_answer_is_the_same(both: Callable[..., tuple[Any, Any]], question: tuple[Any, ...]) -> None:
    original, mine = both(*question)
    assert mine == original
