"""Each difference between the original libraries and their adapters, on both sides.

They are the rows of `docs/compat_differences.md`, which are called as their tests. Those that only concern
`torch.distributed.pipeline.sync`, which no longer runs, show the adapter alone.
"""

import ast
import copy
import random
import re
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "compat_differences.md"
CHECKPOINT_MODES = ("never", "except_last", "always")

Both = Callable[..., tuple[Any, Any]]

only_torchgpipe = pytest.mark.parametrize("name", ["torchgpipe"], indirect=True)
only_fairscale = pytest.mark.parametrize("name", ["fairscale"], indirect=True)
only_sync = pytest.mark.usefixtures("rpc")


class Say(nn.Module):
    """Calls a function with its one argument."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, argument: Any) -> Any:
        return self.function(argument)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))


def fails(answer: Any, *errors: str) -> bool:
    """Whether a scenario has raised one of some errors."""
    return isinstance(answer, tuple) and answer[0] == "raises" and answer[1] in errors


def attempt(function: Callable[[], Any]) -> Any:
    """What a function returns, or which error it raises."""
    try:
        return function()
    except Exception as error:
        return type(error).__name__, str(error)


# ---- The constructor -------------------------------------------------------------------------------------------------


def without_balance(library: Any) -> Any:
    return library.Pipe(layers())


def test_advice(both: Both) -> None:
    answers = both(without_balance)
    assert all(fails(answer, "ValueError") and "import balance_by_time" in answer[2] for answer in answers)
    assert answers[0][2].splitlines()[0] == answers[1][2].splitlines()[0]
    assert answers[0][2] != answers[1][2]


def meta_layer(library: Any) -> Any:
    return library.pipe(nn.Sequential(nn.Linear(1, 1, device="meta")), [1])(torch.ones(1, 1)).shape


def class_attributes(library: Any) -> list[Any]:
    names = ("balance", "devices", "chunks", "checkpoint")
    return [
        value if isinstance(value := getattr(library.Pipe, name, None), list | int | str) else None for name in names
    ]


def training_flag(library: Any) -> list[bool]:
    pipe = library.pipe(layers().eval(), [1, 2])
    return [pipe.training, pipe.partitions.training, pipe.partitions[0].training, pipe[0].training]


def warned(library: Any) -> list[str]:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        library.pipe(layers(), [3])
    return [warning.category.__name__ for warning in caught]


def several_processes(library: Any) -> list[bool]:
    return [hasattr(library.module(), name) for name in ("AsyncPipe", "PipeRPCWrapper", "LazyModule")]


def internal_modules(library: Any) -> list[bool]:
    names = (
        "microbatch",
        "pipeline",
        "worker",
        "stream",
        "skip.layout",
        "skip.portal",
        "skip.tracker",
        "balance.profile",
    )
    return [isinstance(attempt(lambda name=name: library.module(name)), tuple) for name in names]


def checkpoint_function(library: Any) -> bool:
    return hasattr(library.module("checkpoint"), "checkpoint") and callable(library.module("checkpoint").checkpoint)


# ---- The container ---------------------------------------------------------------------------------------------------


def a_slice(library: Any) -> list[str]:
    return [type(layer).__name__ for layer in library.pipe(layers(), [1, 2])[0:2]]


def partition_hooks(library: Any) -> tuple[list[str], list[str]]:
    import warnings

    seen: list[str] = []
    pipe = library.pipe(layers(), [1, 2], 2)
    pipe.partitions[1].register_forward_hook(lambda *_: seen.append("partition"))
    pipe[2].register_forward_hook(lambda *_: seen.append("layer"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe(torch.ones(4, 2))
    return seen, [str(warning.message)[:27] for warning in caught]


def added_layer(library: Any) -> Tensor:
    pipe = library.pipe(layers(), [1, 2], 2)
    pipe.partitions[1].add_module("more", nn.Threshold(10, 5))
    return pipe(torch.ones(4, 2))


def copied(library: Any) -> list[Any]:
    pipe = library.pipe(layers(), [1, 2], 2)
    fresh = attempt(lambda: copy.deepcopy(pipe)(torch.ones(4, 2)).shape)
    pipe(torch.ones(4, 2))
    return [fresh, attempt(lambda: copy.deepcopy(pipe)(torch.ones(4, 2)).shape)]


def test_copies(both: Both, name: str) -> None:
    """torchgpipe's have no streams before the first mini-batch; fairscale's have threads at once."""
    there, here = both(copied)
    assert here == [(4, 2), (4, 2)]
    assert [answer[0] for answer in there] == {
        "torchgpipe": [4, "AttributeError"],
        "fairscale": ["TypeError", "TypeError"],
    }[name]


def more_chunks(library: Any, used: bool) -> list[int]:
    seen: list[int] = []
    pipe = library.pipe(nn.Sequential(Say(lambda x: (seen.append(len(x)), x)[1])), [1], 2)
    if used:
        pipe(torch.ones(8))
    seen.clear()
    pipe.chunks = 4
    pipe(torch.ones(8))
    return seen


def test_chunks_later(both: Both, name: str) -> None:
    for used in (False, True):
        there, here = both(more_chunks, used)
        assert here == [2, 2, 2, 2]
        assert there == here if name == "torchgpipe" and not used else fails(there, "IndexError")


def other_checkpoint(library: Any) -> bool:
    seen: list[bool] = []
    is_recomputing = library.module().is_recomputing
    pipe = library.pipe(nn.Sequential(nn.Linear(1, 1), Say(lambda x: (seen.append(is_recomputing()), x * 1)[1])), [2])
    pipe.checkpoint = "always"
    pipe(torch.ones(2, 1)).sum().backward()
    return any(seen)


def nonsense_later(library: Any) -> list[Any]:
    pipe = library.pipe(layers(), [3])
    return [attempt(lambda: setattr(pipe, "chunks", 0)), attempt(lambda: setattr(pipe, "checkpoint", "sometimes"))]


def test_nonsense_later(both: Both) -> None:
    there, here = both(nonsense_later)
    assert there == [None, None]
    assert [error for error, _ in here] == ["ValueError", "ValueError"]


# ---- What goes in and comes out --------------------------------------------------------------------------------------


def other_pieces(library: Any) -> list[int]:
    """Nine rows are three pieces, sixteen rows are four: the last has no partner."""
    seen: list[int] = []
    see = Say(lambda pair: (seen.append(len(pair[1])), pair[0])[1])
    library.pipe(nn.Sequential(see), [1], 4)((torch.zeros(9), torch.zeros(16)))
    return seen


def nested_input(library: Any) -> Tensor:
    pair = Say(lambda value: value[0][0] + value[1])
    return library.pipe(nn.Sequential(pair), [1], 2)(((torch.ones(4),), torch.ones(4)))


def empty_input(library: Any) -> Any:
    return library.pipe(layers(), [3])(())


OUTPUTS = {
    "list": lambda x: [x, x],
    "dict": lambda x: {"a": x},
    "None": lambda x: None,
    "number": lambda x: 5,
    "no dimension": lambda x: x.sum(),
    "nested": lambda x: (x, (x,)),
    "pair with a number": lambda x: (x, 3),
}


def returned(library: Any, what: str) -> Any:
    return library.pipe(nn.Sequential(Say(OUTPUTS[what])), [1], 2)(torch.ones(4))


def test_outputs(both: Both) -> None:
    for what in OUTPUTS:
        there, here = both(returned, what)
        assert fails(there, "TypeError", "KeyError", "RuntimeError") or (what == "list" and isinstance(there, tuple))
        ones = [1.0] * 4
        expected = {
            "list": [ones, ones],
            "dict": {"a": ones},
            "None": [None, None],
            "number": [5, 5],
            "no dimension": 2.0,
            "nested": (ones, (ones,)),
            "pair with a number": (ones, [3, 3]),
        }[what]
        assert numbers(here) == expected


def numbers(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: numbers(each) for key, each in value.items()}
    return type(value)(map(numbers, value)) if isinstance(value, list | tuple) else value


PASSED_ON = {
    "dict": (lambda x: {"a": x}, lambda value: value["a"]),
    "None": (lambda x: (x, None), lambda value: value[0]),
    "nested": (lambda x: (x, (x,)), lambda value: value[1][0]),
}


def passed_on(library: Any, what: str) -> Any:
    give, take = PASSED_ON[what]
    return library.pipe(nn.Sequential(Say(give), Say(take)), [1, 1], 2)(torch.ones(4))


Point = namedtuple("Point", "x y")


def named_tuple(library: Any) -> str:
    return type(library.pipe(nn.Sequential(Say(lambda x: Point(x, x))), [1], 2)(torch.ones(4))).__name__


def constants(library: Any, checkpoint: str) -> list[bool]:
    """Whether what needs no gradient is said to need one: in the next partition, and at the end."""
    seen: list[bool] = []
    give = Say(lambda x: (x, x.detach() + 1))
    take = Say(lambda pair: (seen.append(pair[1].requires_grad), (pair[0], pair[1].detach()))[1])
    output = library.pipe(nn.Sequential(nn.Linear(2, 2), give, take), [2, 1], 2, checkpoint)(torch.ones(4, 2))
    return [any(seen), output[1].requires_grad]


def constant_first(library: Any) -> list[float]:
    """The gradient of a bias that is in one of two tensors which a partition hands on, behind a constant."""
    module = nn.Sequential(nn.Linear(2, 2), Say(lambda x: (x.detach(), x)), Say(lambda pair: pair[1] + 0 * pair[0]))
    pipe = library.pipe(module, [2, 1], 2, "except_last")
    pipe(torch.ones(4, 2)).sum().backward()
    return pipe[0].bias.grad.tolist()


def test_a_constant_first(both: Both, name: str) -> None:
    there, here = both(constant_first)
    assert here == [4.0, 4.0]
    assert fails(there, "RuntimeError") if name == "torchgpipe" else there == [2.0, 2.0]


def whole_numbers(library: Any) -> Tensor:
    """An output of whole numbers beside one that needs a gradient."""
    pipe = library.pipe(nn.Sequential(nn.Linear(2, 2), Say(lambda x: (x, x.long()))), [2], 2, "always")
    pipe(torch.ones(4, 2))[0].sum().backward()
    return pipe[0].bias.grad


def frozen(library: Any) -> list[bool]:
    return [
        library.pipe(layers().requires_grad_(False), [1, 2], 2, mode)(torch.ones(4, 2)).requires_grad
        for mode in CHECKPOINT_MODES
    ]


# ---- Gradients -------------------------------------------------------------------------------------------------------


class TwoUses(nn.Module):
    """Multiplies two columns with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x[:, 0] + self.weight * x[:, 1]


def summed(library: Any, checkpoint: str, rows: list[list[float]], before: float | None) -> Tensor:
    """The gradient of a weight after a mini-batch of one row in each micro-batch."""
    pipe = library.pipe(nn.Sequential(TwoUses()), [1], len(rows), checkpoint)
    pipe[0].weight.grad = None if before is None else torch.tensor(before)
    pipe(torch.tensor(rows)).sum().backward()
    return pipe[0].weight.grad.item()


def recomputed_early(library: Any) -> str:
    """The recomputations and backwards of a layer, each with its micro-batch."""
    seen: list[str] = []
    pipe = library.pipe(nn.Sequential(nn.Linear(1, 1)), [1], 3, "except_last")

    def forward(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        if library.module("checkpoint").is_recomputing():
            seen.append(f"R{int(inputs[0])}")

    pipe[0].register_forward_hook(forward)
    pipe[0].register_full_backward_hook(lambda layer, of_inputs, gradients: seen.append(f"B{int(gradients[0])}"))
    output = pipe(torch.arange(3.0, requires_grad=True).view(3, 1))
    (output * torch.arange(3.0).view(3, 1)).sum().backward()
    return " ".join(seen)


@only_fairscale
def test_recomputed_early(both: Both) -> None:
    """torchgpipe recomputes each right before its backward, too."""
    there, here = both(recomputed_early)
    assert there.index("R1") < there.index("B2")
    assert here == "B2 R1 B1 R0 B0"


def autograd_grad(library: Any, checkpoint: str) -> list[Tensor]:
    pipe = library.pipe(layers(), [1, 1, 1], 2, checkpoint)
    return list(torch.autograd.grad(pipe(torch.ones(4, 2)).sum(), list(pipe.parameters())))


def test_autograd_grad(both: Both) -> None:
    """The last micro-batch alone is not checkpointed in the default mode: its gradients were taken for the whole."""
    original, expected = both(autograd_grad, "never")
    assert all(map(torch.equal, original, expected))
    for checkpoint in ("except_last", "always"):
        there, here = both(autograd_grad, checkpoint)
        assert all(map(torch.equal, here, expected))
        if checkpoint == "always":
            assert fails(there, "RuntimeError")
        else:
            assert all(torch.allclose(2 * gradient, right) for gradient, right in zip(there, expected, strict=True))


def retained(library: Any) -> bool:
    pipe = library.pipe(layers(), [1, 2], 2, "always")
    loss = pipe(torch.ones(4, 2)).sum()
    loss.backward(retain_graph=True)
    once = pipe[0].weight.grad.clone()
    loss.backward()
    return torch.equal(pipe[0].weight.grad, 2 * once)


def twice_differentiated(library: Any) -> bool:
    pipe = library.pipe(layers(), [1, 2], 2)
    gradients = torch.autograd.grad(pipe(torch.ones(4, 2)).sum(), list(pipe.parameters()), create_graph=True)
    gradients[0].square().sum().backward()
    return pipe[0].weight.grad is not None


def part_of_the_outputs(library: Any) -> Tensor:
    module = nn.Sequential(nn.Linear(2, 2), Say(lambda x: (x * 2, x * 3)), Say(lambda pair: pair))
    pipe = library.pipe(module, [1, 1, 1], 2, "always")
    pipe(torch.ones(4, 2))[1].sum().backward()
    return pipe[0].bias.grad


def parameter_hooks(library: Any) -> int:
    seen: list[Tensor] = []
    pipe = library.pipe(layers(), [1, 2], 4, "always")
    pipe[0].weight.register_hook(seen.append)
    pipe(torch.ones(4, 2)).sum().backward()
    return len(seen)


def in_place(library: Any, first: bool, needs_gradient: bool) -> Tensor:
    """An in-place layer, first of all or first of the second partition."""
    linear = nn.Linear(2, 2)
    with torch.no_grad():
        linear.weight.copy_(torch.eye(2))
    order = [nn.ReLU(inplace=True), linear] if first else [linear, nn.ReLU(inplace=True)]
    pipe = library.pipe(nn.Sequential(*order), [1, 1], 2, "always")
    x = torch.ones(4, 2, requires_grad=needs_gradient)
    pipe(x).sum().backward()
    return linear.weight.grad


# ---- Layers at work --------------------------------------------------------------------------------------------------


def grad_mode(library: Any) -> bool:
    seen: list[bool] = []
    is_checkpointing = library.module().is_checkpointing
    see = Say(lambda x: (seen.append(torch.is_grad_enabled()) if is_checkpointing() else None, x * 1)[1])
    library.pipe(nn.Sequential(see), [1], 2, "always")(torch.ones(4, requires_grad=True))
    return all(seen)


def recomputed_partitions(library: Any, evaluating: int) -> list[bool]:
    """Which of two partitions are computed again if one is in evaluation mode."""
    seen = [False, False]
    is_recomputing = library.module().is_recomputing

    def see(partition: int) -> nn.Module:
        return Say(lambda x: (seen.__setitem__(partition, seen[partition] or is_recomputing()), x * 1)[1])

    pipe = library.pipe(nn.Sequential(see(0), see(1)), [1, 1], 2, "always")
    pipe.partitions[evaluating].eval()
    pipe(torch.ones(4, requires_grad=True)).sum().backward()
    return seen


def test_evaluating_partitions(both: Both, name: str) -> None:
    """There the flag of the whole pipe counted (t), or that of its first partition (f)."""
    assert both(recomputed_partitions, 0) == ([name == "torchgpipe"] * 2, [False, True])
    assert both(recomputed_partitions, 1) == ([True, True], [True, False])


def without_gradients(library: Any) -> bool:
    seen: list[bool] = []
    is_checkpointing = library.module().is_checkpointing
    pipe = library.pipe(nn.Sequential(Say(lambda x: (seen.append(is_checkpointing()), x)[1])), [1], 2, "always")
    with torch.no_grad():
        pipe(torch.ones(4))
    return any(seen)


def settings(library: Any) -> list[Any]:
    seen: list[str] = []
    pipe = library.pipe(nn.Sequential(nn.Linear(2, 2)), [1], 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        dtype = str(pipe(torch.ones(4, 2)).dtype)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (seen.append("packed"), tensor)[1], lambda x: x):
        pipe(torch.ones(4, 2))
    return [dtype, "packed" in seen]


def dropped(library: Any) -> tuple[Tensor, bool]:
    """What dropout leaves of ones, and whether its recomputation has left the same."""
    x = torch.ones(32, 4, requires_grad=True)
    output = library.pipe(nn.Sequential(nn.Dropout(0.5)), [1], 4, "always")(x)
    output.sum().backward()
    return output.detach(), torch.equal(output.detach(), x.grad)


def next_number(library: Any) -> float:
    """What PyTorch's generator gives next, after a mini-batch for layers that need no random numbers."""
    pipe = library.pipe(nn.Sequential(nn.Tanh()), [1])
    torch.manual_seed(0)
    pipe(torch.ones(2))
    return torch.rand(()).item()


def test_random_numbers(both: Both) -> None:
    torch.manual_seed(0)
    first = torch.rand(()).item()
    there, here = both(next_number)
    assert there == first != here
    there, here = both(dropped)
    assert there[1] is here[1] is True
    assert not torch.equal(there[0], here[0])
    assert all(0.3 < output.count_nonzero() / output.numel() < 0.7 for output, _ in (there, here))


def recomputed(library: Any) -> int:
    """How many micro-batches of three are computed again, if four were wanted."""
    seen: list[bool] = []
    is_recomputing = library.module().is_recomputing
    see = Say(lambda x: (seen.append(is_recomputing()), x * 1)[1])
    library.pipe(nn.Sequential(nn.Linear(1, 1), see), [2], 4, "except_last")(torch.ones(6, 1)).sum().backward()
    return seen.count(True)


class Count(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 1


def counted(library: Any) -> list[int]:
    pipe = library.pipe(nn.Sequential(nn.BatchNorm1d(2), Count()), [1, 1], 2, "always")
    pipe(torch.randn(4, 2)).sum().backward()
    return [pipe[0].num_batches_tracked.item(), pipe[1].calls.item()]


def thread_names(library: Any) -> int:
    """How many threads compute two partitions on the CPU."""
    seen: set[int] = set()
    see = [Say(lambda x: (seen.add(threading.get_ident()), x)[1]) for _ in range(2)]
    library.pipe(nn.Sequential(*see), [1, 1], 2)(torch.ones(4))
    return len(seen)


# ---- Deferred batch norm ---------------------------------------------------------------------------------------------


def deferred(library: Any, rows: int) -> tuple[float, int]:
    """Variance and count of a mini-batch of 0, 1, 2, ... in four pieces."""
    pipe = library.pipe(nn.Sequential(nn.BatchNorm1d(1, momentum=1.0)), [1], 4, "never", deferred_batch_norm=True)
    pipe(torch.arange(float(rows)).view(rows, 1))
    return pipe[0].running_var.item(), pipe[0].num_batches_tracked.item()


def deferred_entries(library: Any) -> list[str]:
    return list(library.module("batchnorm").DeferredBatchNorm(2).state_dict())


def test_deferred_sums(both: Both) -> None:
    there, here = both(deferred_entries)
    assert there == [*here, "sum", "sum_squares"]


def converted(library: Any, norm: str) -> list[Any]:
    module = {"1d": nn.BatchNorm1d(2).eval(), "sync": nn.SyncBatchNorm(2)}[norm]
    deferred = library.module("batchnorm").DeferredBatchNorm.convert_deferred_batch_norm(module, 2)
    return [type(deferred).__name__, deferred.training]


# ---- Failures --------------------------------------------------------------------------------------------------------


def exiting(library: Any) -> str:
    pipe = library.pipe(nn.Sequential(Say(lambda x: sys.exit(3))), [1], 2)
    try:
        pipe(torch.ones(4))
    except SystemExit as end:
        return f"exit {end.code}"
    return "nothing"


@pytest.mark.slow
def test_exits(ask: Callable[..., Any], adapter: Any) -> None:
    assert ask(exiting, patience=10) == "waits for ever"
    assert exiting(adapter) == "exit 3"


@pytest.mark.slow
@only_fairscale
def test_end_of_a_script(ask: Callable[..., Any], adapter: Any) -> None:
    """With a pipe that has a global name."""
    script = """
import sys, importlib, torch
Pipe = importlib.import_module(sys.argv[1]).Pipe
pipe = Pipe(torch.nn.Sequential(torch.nn.ReLU()), [1], devices=["cpu"])
pipe(torch.ones(2))
print("done", flush=True)
"""
    for package, ends in (("fairscale.nn", False), ("pipework.compat.fairscale.nn", True)):
        command = [sys.executable, "-W", "ignore", "-c", script, package]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdout.readline() == "done\n"
            try:
                process.wait(20 if ends else 5)
                assert ends
            except subprocess.TimeoutExpired:
                process.kill()
                assert not ends


def notes(library: Any) -> list[str]:
    pipe = library.pipe(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), [1, 1], 2)
    try:
        pipe(torch.ones(4, 3))
    except RuntimeError as error:
        return getattr(error, "__notes__", [])
    return ["nothing"]


# ---- Skip connections ------------------------------------------------------------------------------------------------


def skippable(
    library: Any, stash: Any = (), pop: Any = (), commands: Callable[[Any], Iterator[Any]] | None = None
) -> Any:
    """A skippable layer that returns its input, or its input plus what it has popped last."""
    skip = library.module("skip")

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Any:
            popped = None
            for command in commands(skip) if commands else ():
                popped = yield command
            return x if popped is None else x + popped

    return skip.skippable(stash=stash, pop=pop)(Layer)()


def nested(library: Any) -> Any:
    return library.module("skip").verify_skippables(nn.Sequential(nn.Sequential(skippable(library, ["a"]))))


def twice(library: Any, what: str) -> Tensor:
    stash = skippable(
        library,
        ["a"],
        (),
        lambda skip: (skip.stash("a", torch.full((2,), float(k))) for k in range(3 if what == "stash" else 1)),
    )
    pop = skippable(library, (), ["a"], lambda skip: (skip.pop("a") for _ in range(2 if what == "pop" else 1)))
    return library.pipe(nn.Sequential(stash, pop), [1, 1], 1)(torch.ones(2))


def stashed_number(library: Any, inside: bool) -> Tensor:
    stash = skippable(library, ["a"], (), lambda skip: iter([skip.stash("a", 5)]))
    pop = skippable(library, (), ["a"], lambda skip: iter([skip.pop("a")]))
    module = nn.Sequential(stash, pop)
    return (library.pipe(module, [1, 1], 2) if inside else module)(torch.ones(2))


def text_as_names(library: Any) -> str:
    return str(len(library.module("skip").skippable(stash="ab")(nn.Identity).stashable_names))


def unknown_names(library: Any) -> str:
    return type(skippable(library, ["a"]).isolate(library.module("skip").Namespace(), only=["b"])).__name__


def popped_early(library: Any) -> Any:
    """A layer that stashes nothing, though it should, and before that could not pop."""
    return skippable(library, ["a"], ["b"])(torch.ones(1))


def attributes(library: Any) -> set[str]:
    return {name for name in dir(skippable(library, ["a"])) if not name.startswith("_")} - set(dir(nn.Module()))


def test_skippable_attributes(both: Both) -> None:
    there, here = both(attributes)
    assert there - here == {"dispatch", "module_cls", "namespaced", "namespaces", "poppable", "stashable"}


def namespaces(library: Any) -> list[Any]:
    kind = library.module("skip").Namespace
    return [isinstance(None, kind), hasattr(kind(), "id"), attempt(lambda: kind() < 3)]


def test_namespaces(both: Both) -> None:
    there, here = both(namespaces)
    assert there == [True, True, False]
    assert here[:2] == [False, False]
    assert here[2][0] == "TypeError"


def stale(library: Any) -> Any:
    """A layer fails after it has stashed something; then another pops."""

    def commands(skip: Any) -> Iterator[Any]:
        yield skip.stash("stale", torch.ones(1))
        raise ZeroDivisionError

    answers = []

    def work() -> None:  # in a thread of its own, because what is stashed there is of no concern elsewhere
        attempt(lambda: skippable(library, ["stale"], (), commands)(torch.ones(1)))
        pop = skippable(library, (), ["stale"], lambda skip: iter([skip.pop("stale")]))
        answers.append(attempt(lambda: pop(torch.ones(1)).item()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return answers[0]


# ---- Balance ---------------------------------------------------------------------------------------------------------


def balanced_anywhere(library: Any, by: str, where: dict[str, str]) -> list[int]:
    return getattr(library.module("balance"), by)(1, layers(), torch.ones(4, 2), **where)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_balance_device(both: Both) -> None:
    there, here = both(balanced_anywhere, "balance_by_time", {})
    assert fails(there, "AssertionError", "RuntimeError")
    assert here == [3]


def too_many(library: Any) -> list[int]:
    return library.module("balance").balance_by_time(9, layers(), torch.ones(4, 2), timeout=0.01, device="cpu")


def largest_blocks(library: Any) -> list[int]:
    solve = library.module("balance.blockpartition").solve
    dice = random.Random(0)
    rows = [[dice.randint(1, 20) for _ in range(7)] for _ in range(20)]
    return [max(map(sum, solve(row, 3))) for row in rows]


def test_the_best_balance(both: Both) -> None:
    there, here = both(largest_blocks)
    assert all(mine <= theirs for theirs, mine in zip(there, here, strict=True))
    assert sum(here) < sum(there)


# ---- torch.distributed.pipeline.sync: the adapter alone --------------------------------------------------------------


def sync_pipe(*layers: nn.Module, chunks: int = 2, **options: Any) -> Any:
    from pipework.compat.sync import Pipe

    return Pipe(nn.Sequential(*layers), chunks, **options)


@only_sync
def test_layers_without_parameters() -> None:
    """They ran on the CPU, with a copy to it and one back."""
    linear = nn.Linear(2, 2, device="meta")
    pipe = sync_pipe(linear, nn.ReLU(), nn.Linear(2, 2, device="meta"))
    assert [str(device) for device in pipe._pipe.devices] == ["meta"]


@only_sync
def test_nested_forwards() -> None:
    """A nested sequence was taken apart, and its own forward and hooks were lost."""

    class AddsOne(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    assert torch.equal(sync_pipe(AddsOne(nn.Identity()))(torch.zeros(4)).local_value(), torch.ones(4))


@only_sync
def test_distributed_data_parallel() -> None:
    """It was documented for checkpoint='never' only; `tests/compat/sync/test_ddp.py` has two replicas in every mode."""
    from torch.distributed import HashStore, destroy_process_group, init_process_group, is_initialized

    def trained(module: nn.Sequential) -> Tensor | None:
        replica = nn.parallel.DistributedDataParallel(sync_pipe(*module, checkpoint="always"))
        replica(torch.ones(4, 2)).local_value().sum().backward()
        return module[0].weight.grad

    assert not is_initialized()
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        # The replica must be gone before its group: the last one to hold a group may wait for ever as it lets go.
        assert trained(nn.Sequential(nn.Linear(2, 2), nn.Tanh())) is not None
    finally:
        destroy_process_group()


@only_sync
def test_a_loss_in_the_last_layer() -> None:
    """A value without dimensions could not be concatenated; here it is averaged, weighted by rows."""
    pipe = sync_pipe(Say(torch.mean), chunks=2)
    x = torch.arange(3.0)  # two rows and one
    assert pipe(x).local_value() == x.mean()


# ---- The rows that a scenario and two answers show ------------------------------------------------------------------


class Raises:
    """Equals the answer of a scenario that has raised one of some errors, whose message has a text in it."""

    def __init__(self, *errors: str, text: str = "") -> None:
        self.errors = errors
        self.text = text

    def __eq__(self, answer: object) -> bool:
        return fails(answer, *self.errors) and self.text in answer[2]

    __hash__ = None


SMALL, LOST, KEPT = 2.0**-24, 1.0, 1 + 2.0**-23
"""2^-24 is half of the last digit of 1: added to it twice it is lost twice, and added to itself first it is not."""

# The name of a row, the libraries (f: fairscale, t: torchgpipe), the scenario with its arguments, and what the original
# library and the adapter answer. Several rows may have one name.
DIFFERENCES = [
    ("meta-layer", "ft", (meta_layer,), Raises("NotImplementedError"), (1, 1)),
    ("class-attributes", "ft", (class_attributes,), [[], [], 1, "except_last"], [None] * 4),
    ("training-flag", "ft", (training_flag,), [True, True, True, False], [False] * 4),
    ("deprecation", "f", (warned,), ["DeprecationWarning"], []),
    ("several-processes", "f", (several_processes,), [True] * 3, [False] * 3),
    ("internal-modules", "ft", (internal_modules,), [False] * 8, [True] * 8),
    ("checkpoint-function", "t", (checkpoint_function,), True, False),
    ("slices", "ft", (a_slice,), Raises("TypeError"), ["Linear", "Tanh"]),
    (
        "partition-hooks", "ft", (partition_hooks,), (["layer", "partition"] * 2, []),
        (["layer"] * 2, ["partitions[1] has hooks, wh"]),
    ),
    ("added-layers", "ft", (added_layer,), torch.full((4, 2), 5.0), Raises("ValueError")),
    ("checkpoint-later", "f", (other_checkpoint,), False, True),
    ("pieces", "ft", (other_pieces,), [4, 4, 4], Raises("RuntimeError")),
    ("nested-inputs", "ft", (nested_input,), Raises("AttributeError"), torch.full((4,), 2.0)),
    ("an-empty-tuple", "ft", (empty_input,), Raises("IndexError"), Raises("TypeError")),
    *(("boundaries", "ft", (passed_on, what), Raises("AttributeError"), torch.ones(4)) for what in PASSED_ON),
    ("named-tuples", "ft", (named_tuple,), "tuple", "Point"),
    ("constants", "ft", (constants, "never"), [True, False], [False, False]),
    ("constants", "ft", (constants, "always"), [True, True], [False, False]),
    ("whole-numbers", "t", (whole_numbers,), Raises("RuntimeError"), torch.full((2,), 4.0)),
    ("frozen-models", "ft", (frozen,), [False, True, True], [False, False, False]),
    # From the last micro-batch to the first; to what was there; with two uses in each micro-batch.
    ("order-of-sums", "ft", (summed, "never", [[1, 0], [SMALL, 0], [SMALL, 0]], None), KEPT, KEPT),
    ("order-of-sums", "ft", (summed, "never", [[SMALL, 0], [SMALL, 0]], 1.0), KEPT, KEPT),
    ("order-of-sums", "ft", (summed, "always", [[SMALL, 0], [SMALL, 0]], 1.0), LOST, KEPT),
    ("order-of-sums", "ft", (summed, "never", [[SMALL, SMALL], [1, 0]], None), LOST, KEPT),
    ("order-of-sums", "ft", (summed, "always", [[SMALL, SMALL], [1, 0]], None), KEPT, KEPT),
    ("retain-graph", "t", (retained,), Raises("IndexError"), True),
    ("create-graph", "ft", (twice_differentiated,), True, Raises("RuntimeError")),
    ("part-of-the-outputs", "ft", (part_of_the_outputs,), Raises("IndexError"), torch.full((2,), 12.0)),
    ("parameter-hooks", "ft", (parameter_hooks,), 4, 1),
    *(
        ("in-place-layers", "ft", (in_place, *each), Raises("RuntimeError"), torch.full((2, 2), 4.0))
        for each in ((False, False), (False, True), (True, False))
    ),
    (  # It stays an error, as in the un-partitioned model: with PyTorch's message for that model.
        "in-place-input", "ft", (in_place, True, True), Raises("RuntimeError", text="Output 0 of Split is a view"),
        ("raises", "RuntimeError", "a leaf Variable that requires grad is being used in an in-place operation."),
    ),
    ("grad-mode", "ft", (grad_mode,), False, True),
    ("no-grad", "ft", (without_gradients,), True, False),
    ("settings-of-the-caller", "ft", (settings,), ["torch.float32", False], ["torch.bfloat16", True]),
    ("the-last-micro-batch", "ft", (recomputed,), 3, 2),
    ("counted-twice", "ft", (counted,), [4, 4], [2, 2]),
    ("workers-on-the-cpu", "ft", (thread_names,), 1, 2),
    ("deferred-variance", "ft", (deferred, 8), (5.25, 1), (6.0, 1)),
    ("deferred-with-fewer-pieces", "ft", (deferred, 6), (1.0, 0), (3.5, 1)),
    ("deferred-flag", "ft", (converted, "1d"), ["DeferredBatchNorm", True], ["DeferredBatchNorm", False]),
    ("deferred-sync-batch-norm", "ft", (converted, "sync"), ["DeferredBatchNorm", True], ["SyncBatchNorm", True]),
    (
        "notes", "ft", (notes,), [],
        ["pipework: in layer '1' (Linear)", "pipework: stage 1, micro-batch 0, action F"],
    ),
    ("nested-skips", "ft", (nested,), None, Raises("TypeError")),
    ("skips-twice", "ft", (twice, "stash"), torch.full((2,), 3.0), Raises("RuntimeError")),  # the last counted
    ("skips-twice", "ft", (twice, "pop"), Raises("KeyError"), Raises("RuntimeError")),
    ("stashed-values", "ft", (stashed_number, False), torch.full((2,), 6.0), Raises("TypeError")),
    ("stashed-values", "ft", (stashed_number, True), Raises("AttributeError"), Raises("TypeError")),
    ("skip-names", "ft", (text_as_names,), "2", Raises("TypeError")),
    ("skip-names", "ft", (unknown_names,), "Layer", Raises("ValueError")),
    (
        "skip-checks", "ft", (popped_early,), ("raises", "RuntimeError", "'b' has not been stashed"),
        ("raises", "RuntimeError", "'a' must be stashed but have not"),
    ),
    ("stashes-of-a-layer-that-fails", "ft", (stale,), ("RuntimeError", "'stale' has not been stashed"), 2.0),
    (
        "balance-by-size-on-the-cpu", "ft", (balanced_anywhere, "balance_by_size", {"device": "cpu"}),
        Raises("ValueError"), [3],
    ),
    (
        "balance-messages", "ft", (too_many,),
        ("raises", "ValueError", "sequence is shorter than intended partitions (3 < 9)"),
        ("raises", "ValueError", "cannot make 9 partitions of 3 layers: ask for at most 3"),
    ),
]  # fmt: skip
LIBRARIES = {"f": "fairscale", "t": "torchgpipe"}


@pytest.mark.parametrize(
    ("name", "row"),
    [(LIBRARIES[letter], row) for row in DIFFERENCES for letter in row[1]],
    indirect=["name"],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_difference(both: Both, row: tuple[Any, ...]) -> None:
    for answer, expected in zip(both(*row[2]), row[3:], strict=True):
        if isinstance(expected, Tensor):
            assert torch.equal(answer, expected)
        else:
            assert expected == answer
            assert isinstance(answer, bool) == isinstance(expected, bool)


# ---- The page --------------------------------------------------------------------------------------------------------


def rows() -> dict[str, str]:
    """The rows of the page: which libraries each is about."""
    found = re.findall(r"^\| `([a-z-]+)` \| ([tfs ]+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(found) == len(dict(found)), "two rows have the same name"
    return dict(found)


def difference_tests() -> dict[str, set[str]]:
    """The tests above that page: for each the libraries that it runs with."""
    found = {name: {*letters} for name, letters, *_ in DIFFERENCES}
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    for node in tree.body:
        if (
            isinstance(node, ast.FunctionDef)
            and node.name.startswith("test_")
            and node.name not in ("test_the_page", "test_difference")
        ):
            marks = {ast.unparse(mark) for mark in node.decorator_list}
            libraries = {"only_torchgpipe": {"t"}, "only_fairscale": {"f"}, "only_sync": {"s"}}
            found[node.name.removeprefix("test_").replace("_", "-")] = next(
                (letters for mark, letters in libraries.items() if mark in marks), {"t", "f"}
            )
    return found


def test_the_page() -> None:
    """Every row has a test and every test a row; sync may be named in any, since its adapter runs the same engine."""
    tests = difference_tests()
    page = {row: set(letters.split()) for row, letters in rows().items()}
    assert sorted(page) == sorted(tests)
    assert {row: letters - {"s"} or letters for row, letters in page.items()} == tests
