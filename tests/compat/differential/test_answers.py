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

from tests.compat.originals import Say, layers, outcome

CHECKPOINT_MODES = ("never", "except_last", "always")


def twice() -> nn.Sequential:
    layer = nn.Linear(2, 2)
    return nn.Sequential(layer, nn.ReLU(), layer)


def tied() -> nn.Sequential:
    module = layers()
    module[2].weight = module[0].weight
    return module


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
    "chunks 'x'": lambda library: library.pipe(layers(), [3], "x"),
    "chunks '4'": lambda library: repr(library.pipe(layers(), [3], "4").chunks),
    "chunks 2.7": lambda library: repr(library.pipe(layers(), [3], 2.7).chunks),
    "checkpoint 'x'": lambda library: library.pipe(layers(), [3], 1, "x"),
    "chunks and checkpoint": lambda library: library.pipe(layers(), [3], 0, "x"),
    "checkpoint and module": lambda library: library.pipe(None, [3], 1, "x"),
    "no sequence": lambda library: library.pipe(nn.Linear(1, 1), [1]),
    "a layer twice": lambda library: library.pipe(twice(), [1, 2]),
    "tied weights": lambda library: list(library.pipe(tied(), [1, 2]).state_dict()),
    "no balance": lambda library: first_line(lambda: library.Pipe(None)),
    "a small balance": lambda library: first_line(lambda: library.pipe(layers(), [1])),
    "a zero in the balance": lambda library: first_line(lambda: library.pipe(layers(), [0, 3])),
    "a wrong balance and too few devices": lambda library: first_line(
        lambda: library.Pipe(layers(), [1, 1, 2], devices=["cpu"])
    ),
    "a number as balance": lambda library: library.Pipe(layers(), 3, devices=["cpu"]),
    "a balance of floats": lambda library: library.Pipe(layers(), [1.0, 2.0], devices=["cpu"] * 2).balance,
    "a balance of halves": lambda library: first_line(lambda: library.Pipe(layers(), [0.5, 2], devices=["cpu"] * 2)),
    "text as balance": lambda library: library.Pipe(layers(), "12", devices=["cpu"]),
    "too few devices": lambda library: library.Pipe(layers(), [1, 1, 1], devices=["cpu"]),
    "an unknown device": lambda library: library.Pipe(layers(), [3], devices=["bogus"]),
    "kinds of devices": lambda library: str(
        library.Pipe(layers(), iter((1, 2)), devices=iter([torch.device("cpu"), "cpu:0"])).devices
    ),
    "no devices at all": lambda library: library.Pipe(layers(), [1, 1, 1]),
    "a weight twice within a layer": lambda library: len(list(library.pipe(nn.Sequential(tied()), [1]).parameters())),
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
    "forwards of sequences of their own": lambda library: [
        plain(library.pipe(module, [1])(torch.zeros(1)))
        for module in (AddsOne(nn.Identity()), nn.Sequential(AddsOne(nn.Identity())))
    ],
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
    "beyond": lambda pipe: [outcome(lambda index=index: pipe[index])[1] for index in (3, -4)],
    "by name": lambda pipe: outcome(lambda: pipe["0"])[1],
    "cuda": lambda pipe: pipe.cuda(),
    "cpu": lambda pipe: pipe.cpu(),
    "to a device": lambda pipe: pipe.to(torch.device("cpu")),
    "to a tensor": lambda pipe: pipe.to(torch.ones(1)),
    "to device=None": lambda pipe: pipe.to(device=None, dtype=torch.float64),
    "to tensor=": lambda pipe: pipe.to(tensor=torch.ones(1)),
    "to dtype=": lambda pipe: str(pipe.to(dtype=torch.float64)[0].weight.dtype),
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


def verified(library: Any, what: str) -> None:
    skip = library.module("skip")
    namespaces = {number: skip.Namespace() for number in (1, 2)}
    layers = [skippable(library, stash, pop, *map(namespaces.get, rest)) for stash, pop, *rest in VERIFIED[what]]
    return skip.verify_skippables(nn.Sequential(*layers))


BALANCED = {
    "a tuple": lambda by_time: by_time(1, nn.Sequential(Say(sum)), (torch.ones(4, 2), torch.ones(4, 2))),
    "no partitions": lambda by_time: outcome(lambda: by_time(0, layers(), torch.ones(4, 2)))[1],
    "no layers": lambda by_time: outcome(lambda: by_time(1, nn.Sequential(), torch.ones(4, 2)))[1],
    "layers that do not fit": lambda by_time: by_time(1, nn.Sequential(nn.Linear(3, 2)), torch.ones(4, 2)),
    "in evaluation mode": lambda by_time: [
        by_time(1, module := nn.Sequential(nn.BatchNorm1d(2)).eval(), torch.ones(4, 2)),
        module[0].training,
        module[0].num_batches_tracked.item(),
    ],
    "after a backward": lambda by_time: outcome(lambda: by_time(1, with_gradients(), torch.ones(4, 2)))[2][:34],
}


def with_gradients() -> nn.Sequential:
    module = layers()
    module(torch.ones(4, 2)).sum().backward()
    return module


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
    """Whether a layer's exception comes out itself, and what the pipe does afterwards."""
    errors = [ZeroDivisionError("mine")]

    def fail(x: Tensor) -> Tensor:
        for error in errors:
            raise error
        return x

    pipe = library.pipe(nn.Sequential(nn.Linear(2, 2), Say(fail), nn.Linear(2, 2)), [1, 1, 1], 2, checkpoint)
    with pytest.raises(ZeroDivisionError) as caught:
        pipe(torch.ones(4, 2))
    return [caught.value is errors.pop(), list(pipe(torch.ones(4, 2)).shape)]


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
    *((passed_on, *case) for case in itertools.product(PASSED_ON, ["never"])),
    *((passed_on, "a pair", checkpoint) for checkpoint in CHECKPOINT_MODES[1:]),
    *((verified, what) for what in VERIFIED),
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
