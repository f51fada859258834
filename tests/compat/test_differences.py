"""What the adapters of torchgpipe and fairscale answer where these libraries answer otherwise.

They are the rows of `docs/compat_differences.md`, which have the same names.
"""

import copy
import random
import re
import sys
import threading
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.compat.originals import Library, Say, answer, layers, outcome

PAGE = Path(__file__).parents[2] / "docs" / "compat_differences.md"
LIBRARIES = {"f": "fairscale", "t": "torchgpipe"}


class Raises:
    """Equals the answer of a scenario that has raised an error, whose message has a text in it."""

    def __init__(self, error: str, text: str = "") -> None:
        self.error = error
        self.text = text

    def __eq__(self, answer: object) -> bool:
        is_error = isinstance(answer, tuple) and answer[0] == "raises"
        return is_error and answer[1] == self.error and self.text in answer[2]

    __hash__ = None


class Row(NamedTuple):
    """A question to a library, and what its adapter answers.

    Attributes:
        name: of the row of the page; several may have one name.
        libraries: f for fairscale, t for torchgpipe.
        ask: the scenario.
        here: the answer.
    """

    name: str
    libraries: str
    ask: Callable[[Any], Any]
    here: Any


# ---- Scenarios of several lines --------------------------------------------------------------------------------------


def piped(library: Any, *modules: nn.Module, chunks: int = 2, checkpoint: str = "never", **options: Any) -> Any:
    """A pipe in which each layer is a partition."""
    return library.pipe(nn.Sequential(*modules), [1] * len(modules), chunks, checkpoint, **options)


def said(library: Any, *functions: Callable[[Any], Any], x: Any = None, chunks: int = 2) -> Any:
    """What a pipe of functions gives, as lists."""
    return numbers(piped(library, *map(Say, functions), chunks=chunks)(torch.ones(4) if x is None else x))


def numbers(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: numbers(each) for key, each in value.items()}
    return type(value)(map(numbers, value)) if type(value) in (list, tuple) else value


def watched(
    library: Any,
    look: Callable[[Any], Any],
    *before: nn.Module,
    chunks: int = 2,
    checkpoint: str = "always",
    x: Any = None,
    change: Callable[[Any], Any] = id,
) -> list[Any]:
    """What a layer sees each time that it runs in a step, behind other layers; the pipe may be changed before."""
    seen: list[Any] = []
    pipe = piped(
        library, *before, Say(lambda x: (seen.append(look(x)), x * 1)[1]), chunks=chunks, checkpoint=checkpoint
    )
    change(pipe)
    pipe(torch.ones(4, 1, requires_grad=True) if x is None else x).sum().backward()
    return seen


def caught(do: Callable[[], Any]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        do()
    return found


def partition_hooks(library: Any) -> list[Any]:
    seen: list[str] = []
    pipe = library.pipe(layers(), [1, 2], 2)
    pipe.partitions[1].register_forward_hook(lambda *_: seen.append("partition"))
    pipe[2].register_forward_hook(lambda *_: seen.append("layer"))
    return [*(str(warning.message)[:27] for warning in caught(lambda: pipe(torch.ones(4, 2)))), *seen]


def added_layer(library: Any) -> Tensor:
    pipe = library.pipe(layers(), [1, 2], 2)
    pipe.partitions[1].add_module("more", nn.Threshold(10, 5))
    return pipe(torch.ones(4, 2))


def copied(library: Any) -> list[Any]:
    """What copies give that are made before and after the first mini-batch; the kinds of errors."""
    pipe = library.pipe(layers(), [1, 2], 2)
    given = [outcome(lambda: copy.deepcopy(pipe)(torch.ones(4, 2)).shape)]
    pipe(torch.ones(4, 2))
    given.append(outcome(lambda: copy.deepcopy(pipe)(torch.ones(4, 2)).shape))
    return [each[1] if each[0] == "raises" else tuple(each) for each in given]


def more_chunks(library: Any, used: bool) -> list[int]:
    def change(pipe: Any) -> None:
        if used:
            pipe(torch.ones(4))
        pipe.chunks = 4

    return watched(library, len, checkpoint="never", x=torch.ones(8, requires_grad=True), change=change)[-4:]


def other_checkpoint(library: Any) -> bool:
    look = library.module().is_recomputing
    change: Callable[[Any], Any] = lambda pipe: setattr(pipe, "checkpoint", "always")  # noqa: E731
    return any(watched(library, lambda x: look(), nn.Linear(1, 1), checkpoint="never", change=change))


def nonsense_later(library: Any) -> list[str]:
    pipe = library.pipe(layers(), [3])
    changes = {"chunks": 0, "checkpoint": "sometimes"}.items()
    return [(outcome(lambda change=change: setattr(pipe, *change)) or ["", "none"])[1] for change in changes]


def constants(library: Any, checkpoint: str) -> list[bool]:
    """Whether what needs no gradient is said to need one: in the next partition, and at the end."""
    seen: list[bool] = []
    give = nn.Sequential(nn.Linear(2, 2), Say(lambda x: (x, x.detach() + 1)))
    take = Say(lambda pair: (seen.append(pair[1].requires_grad), (pair[0], pair[1].detach()))[1])
    output = piped(library, give, take, checkpoint=checkpoint)(torch.ones(4, 2))
    return [any(seen), output[1].requires_grad]


def bias_gradient(library: Any, *behind: Callable[[Any], Any], checkpoint: str = "always", output: Any = id) -> Tensor:
    """The gradient of a bias behind which there are functions; `output` chooses one of the outputs."""
    pipe = piped(library, nn.Linear(2, 2), *map(Say, behind), checkpoint=checkpoint)
    given = pipe(torch.ones(4, 2))
    (given if output is id else given[output]).sum().backward()
    return pipe[0].bias.grad.tolist()


class TwoUses(nn.Module):
    """Multiplies two columns with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x[:, 0] + self.weight * x[:, 1]


def summed(library: Any, checkpoint: str, rows: list[list[float]], before: float | None = None) -> float:
    """The gradient of a weight after a mini-batch of one row in each micro-batch."""
    pipe = piped(library, TwoUses(), chunks=len(rows), checkpoint=checkpoint)
    pipe[0].weight.grad = None if before is None else torch.tensor(before)
    pipe(torch.tensor(rows)).sum().backward()
    return pipe[0].weight.grad.item()


def recomputations(library: Any) -> str:
    """The recomputations and backwards of a layer, each with its micro-batch."""
    seen: list[str] = []
    pipe = piped(library, nn.Linear(1, 1), chunks=3, checkpoint="except_last")

    def forward(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        if library.module("checkpoint").is_recomputing():
            seen.append(f"R{int(inputs[0])}")

    pipe[0].register_forward_hook(forward)
    pipe[0].register_full_backward_hook(lambda layer, of_inputs, gradients: seen.append(f"B{int(gradients[0])}"))
    output = pipe(torch.arange(3.0, requires_grad=True).view(3, 1))
    (output * torch.arange(3.0).view(3, 1)).sum().backward()
    return " ".join(seen)


def shares_of_gradients(library: Any, checkpoint: str) -> list[float]:
    """What `torch.autograd.grad` gives of each gradient, as a share of that of the model itself."""
    pipe = library.pipe(layers(), [1, 1, 1], 2, checkpoint)
    given = torch.autograd.grad(pipe(torch.ones(4, 2)).sum(), [*pipe.parameters()])
    expected = torch.autograd.grad(nn.Sequential(*pipe)(torch.ones(4, 2)).sum(), [*pipe.parameters()])
    return [round(float((one / other).mean()), 3) for one, other in zip(given, expected, strict=True)]


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


def hook_calls(library: Any) -> int:
    seen: list[Tensor] = []
    pipe = library.pipe(layers(), [1, 2], 4, "always")
    pipe[0].weight.register_hook(seen.append)
    pipe(torch.ones(4, 2)).sum().backward()
    return len(seen)


def in_place(library: Any, first: bool, needs_gradient: bool) -> list[list[float]]:
    """An in-place layer, first of all or first of the second partition."""
    linear = nn.Linear(2, 2)
    nn.init.eye_(linear.weight)
    order = [nn.ReLU(inplace=True), linear] if first else [linear, nn.ReLU(inplace=True)]
    piped(library, *order, checkpoint="always")(torch.ones(4, 2, requires_grad=needs_gradient)).sum().backward()
    return linear.weight.grad.tolist()


def recomputed_partitions(library: Any, evaluating: int) -> list[bool]:
    """Which of two partitions are computed again if one is in evaluation mode."""
    seen = [False, False]
    is_recomputing = library.module().is_recomputing

    def see(partition: int) -> nn.Module:
        return Say(lambda x: (seen.__setitem__(partition, seen[partition] or is_recomputing()), x * 1)[1])

    pipe = piped(library, see(0), see(1), checkpoint="always")
    pipe.partitions[evaluating].eval()
    pipe(torch.ones(4, requires_grad=True)).sum().backward()
    return seen


def without_gradients(library: Any) -> bool:
    seen: list[bool] = []
    with torch.no_grad():
        is_checkpointing = library.module().is_checkpointing
        piped(library, Say(lambda x: (seen.append(is_checkpointing()), x)[1]), checkpoint="always")(torch.ones(4))
    return any(seen)


def settings(library: Any) -> list[Any]:
    seen: list[str] = []
    pipe = piped(library, nn.Linear(2, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        dtype = str(pipe(torch.ones(4, 2)).dtype)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (seen.append("packed"), tensor)[1], lambda x: x):
        pipe(torch.ones(4, 2))
    return [dtype, "packed" in seen]


def random_state(library: Any) -> list[bool]:
    """Whether PyTorch's generator has moved, and whether dropout and its recomputation are that of the plain layer."""
    x, before = torch.ones(16, 4, requires_grad=True), torch.get_rng_state()
    piped(library, nn.Tanh(), chunks=1)(torch.ones(2))
    has_moved = not torch.equal(before, torch.get_rng_state())
    torch.manual_seed(1)
    output = piped(library, nn.Dropout(0.5), chunks=4, checkpoint="always")(x)
    output.sum().backward()
    torch.manual_seed(1)
    plain = torch.cat([nn.functional.dropout(rows) for rows in torch.ones(16, 4).chunk(4)])
    return [has_moved, torch.equal(output, plain), torch.equal(output, x.grad), 20 < int(output.count_nonzero()) < 44]


class Count(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 1


def counted(library: Any) -> list[int]:
    pipe = piped(library, nn.BatchNorm1d(2), Count(), checkpoint="always")
    pipe(torch.randn(4, 2)).sum().backward()
    return [pipe[0].num_batches_tracked.item(), pipe[1].calls.item()]


def thread_count(library: Any) -> int:
    """How many threads compute two partitions on the CPU."""
    seen: set[int] = set()
    see: Callable[[Any], Any] = lambda x: (seen.add(threading.get_ident()), x)[1]  # noqa: E731
    said(library, see, see)
    return len(seen)


def deferred(library: Any, rows: int) -> tuple[float, int]:
    """Variance and count of a mini-batch of 0, 1, 2, ... in four pieces."""
    pipe = piped(library, nn.BatchNorm1d(1, momentum=1.0), chunks=4, deferred_batch_norm=True)
    pipe(torch.arange(float(rows)).view(rows, 1))
    return pipe[0].running_var.item(), pipe[0].num_batches_tracked.item()


def converted(library: Any, module: nn.Module) -> list[Any]:
    deferred = library.module("batchnorm").DeferredBatchNorm.convert_deferred_batch_norm(module, 2)
    return [type(deferred).__name__, deferred.training]


def exiting(library: Any) -> str:
    with pytest.raises(SystemExit) as end:
        said(library, lambda x: sys.exit(3))
    return f"exit {end.value.code}"


def notes(library: Any) -> list[str]:
    with pytest.raises(RuntimeError) as failed:
        piped(library, nn.ReLU(), nn.Linear(2, 2))(torch.ones(4, 3))
    return getattr(failed.value, "__notes__", [])


def skipping(
    library: Any, stash: Any = (), pop: Any = (), commands: Callable[[Any], Iterator[Any]] = lambda skip: iter(())
) -> Any:
    """A skippable layer that returns its input, or its input plus what it has popped last."""
    skip = library.module("skip")

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Any:
            popped = None
            for command in commands(skip):
                popped = yield command
            return x if popped is None else x + popped

    return skip.skippable(stash=stash, pop=pop)(Layer)()


def skip_pair(library: Any, *stashed: Any, pops: int = 1) -> nn.Sequential:
    """Two layers, one that stashes values under the same name, and one that pops them."""
    return nn.Sequential(
        skipping(library, ["a"], (), lambda skip: (skip.stash("a", each) for each in stashed)),
        skipping(library, (), ["a"], lambda skip: (skip.pop("a") for _ in range(pops))),
    )


def attributes(library: Any) -> list[str]:
    old = ["dispatch", "module_cls", "namespaced", "namespaces", "poppable", "stashable"]
    return [name for name in old if hasattr(skipping(library, ["a"]), name)]


def namespaces(library: Any) -> list[Any]:
    kind = library.module("skip").Namespace
    return [isinstance(None, kind), hasattr(kind(), "id"), outcome(lambda: kind() < 3) is False]


def stale(library: Any) -> Any:
    """A layer fails after it has stashed something; then another pops."""

    def commands(skip: Any) -> Iterator[Any]:
        yield skip.stash("stale", torch.ones(1))
        raise ZeroDivisionError

    answers = []

    def work() -> None:  # in a thread of its own, because what is stashed there is of no concern elsewhere
        outcome(lambda: skipping(library, ["stale"], (), commands)(torch.ones(1)))
        pop = skipping(library, (), ["stale"], lambda skip: iter([skip.pop("stale")]))
        answers.append(outcome(lambda: pop(torch.ones(1)).item()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return answers[0]


def balanced(library: Any, partitions: int, by: str = "balance_by_time", **options: Any) -> list[int]:
    return getattr(library.module("balance"), by)(partitions, layers(), torch.ones(4, 2), **options)


def sum_of_largest_blocks(library: Any) -> bool:
    """Whether the largest blocks of random costs are the smallest possible ones."""
    solve = library.module("balance.blockpartition").solve
    dice = random.Random(0)
    rows = [[dice.randint(1, 20) for _ in range(7)] for _ in range(20)]
    cuts = [(i, j) for i in range(1, 6) for j in range(i + 1, 7)]
    best = [min(max(sum(row[:i]), sum(row[i:j]), sum(row[j:])) for i, j in cuts) for row in rows]
    return [max(map(sum, solve(row, 3))) for row in rows] == best


# ---- The rows --------------------------------------------------------------------------------------------------------

SMALL, KEPT = 2.0**-24, 1 + 2.0**-23
"""2^-24 is half of the last digit of 1: added to it twice it is lost twice, and added to itself first it is not."""

Point = namedtuple("Point", "x y")
ONES = [1.0] * 4
OUTPUTS: list[tuple[Callable[[Any], Any], Any]] = [
    (lambda x: {"a": x}, {"a": ONES}),
    (lambda x: None, [None, None]),
    (lambda x: 5, [5, 5]),
    (lambda x: x.sum(), 2.0),
    (lambda x: (x, (x,)), (ONES, (ONES,))),
    (lambda x: (x, 3), (ONES, [3, 3])),
]
PASSED_ON: list[tuple[Callable[[Any], Any], Callable[[Any], Any]]] = [
    (lambda x: {"a": x}, lambda value: value["a"]),
    (lambda x: (x, None), lambda value: value[0]),
    (lambda x: (x, (x,)), lambda value: value[1][0]),
]

ROWS = [
    Row("meta-layer", "ft", lambda library: piped(library, nn.Linear(1, 1, device="meta"))(torch.ones(1, 1)).shape,
        (1, 1)),
    Row("class-attributes", "ft", lambda library: getattr(library.Pipe, "checkpoint", None) == "except_last", False),
    Row("training-flag", "ft", lambda library: library.pipe(layers().eval(), [1, 2]).training, False),
    Row("deprecation", "f", lambda library: [each.category for each in caught(lambda: piped(library, nn.ReLU()))], []),
    Row("checkpoint-function", "t", lambda library: callable(library.module("checkpoint").checkpoint), False),
    Row("slices", "ft", lambda library: [str(layer) for layer in library.pipe(layers(), [1, 2])[1:2]], ["Tanh()"]),
    Row("partition-hooks", "ft", partition_hooks, ["partitions[1] has hooks, wh", "layer", "layer"]),
    Row("added-layers", "ft", added_layer, Raises("ValueError")),
    Row("copies", "ft", copied, [(4, 2), (4, 2)]),
    Row("chunks-later", "ft", lambda library: more_chunks(library, False), [2] * 4),
    Row("chunks-later", "ft", lambda library: more_chunks(library, True), [2] * 4),
    Row("checkpoint-later", "f", other_checkpoint, True),
    Row("nonsense-later", "ft", nonsense_later, ["ValueError", "ValueError"]),
    Row("pieces", "ft",
        lambda library: said(library, lambda pair: pair[1], x=(torch.zeros(9), torch.zeros(16)), chunks=4),
        Raises("RuntimeError")),
    Row("nested-inputs", "ft",
        lambda library: said(library, lambda pair: pair[0][0] + pair[1], x=((torch.ones(4),), torch.ones(4))),
        [2.0] * 4),
    Row("an-empty-tuple", "ft", lambda library: library.pipe(layers(), [3])(()), Raises("TypeError")),
    Row("outputs", "f", lambda library: said(library, lambda x: [x, x]), [ONES, ONES]),
    *(Row("outputs", "ft", lambda library, give=give: said(library, give), here) for give, here in OUTPUTS),
    *(Row("boundaries", "ft", lambda library, each=each: said(library, *each), ONES) for each in PASSED_ON),
    Row("named-tuples", "ft", lambda library: type(said(library, lambda x: Point(x, x))).__name__, "Point"),
    Row("constants", "ft", lambda library: constants(library, "never"), [False, False]),
    Row("constants", "ft", lambda library: constants(library, "always"), [False, False]),
    # A constant before the tensor with the bias: its gradient.
    Row("a-constant-first", "ft",
        lambda library: bias_gradient(library, lambda x: (x.detach(), x), lambda pair: pair[1] + 0 * pair[0],
                                      checkpoint="except_last"), [4.0, 4.0]),
    Row("whole-numbers", "t", lambda library: bias_gradient(library, lambda x: (x, x.long()), output=0), [4.0, 4.0]),
    Row("part-of-the-outputs", "ft",
        lambda library: bias_gradient(library, lambda x: (x * 2, x * 3), lambda pair: pair, output=1), [12.0, 12.0]),
    Row("frozen-models", "ft",
        lambda library: piped(library, nn.Linear(2, 2).requires_grad_(False), checkpoint="always")(
            torch.ones(4, 2)).requires_grad, False),
    # From the last micro-batch to the first; to what was there; with two uses in each micro-batch.
    Row("order-of-sums", "ft", lambda library: summed(library, "never", [[1, 0], [SMALL, 0], [SMALL, 0]]), KEPT),
    Row("order-of-sums", "ft", lambda library: summed(library, "never", [[SMALL, 0], [SMALL, 0]], 1.0), KEPT),
    Row("order-of-sums", "ft", lambda library: summed(library, "always", [[SMALL, 0], [SMALL, 0]], 1.0), KEPT),
    Row("order-of-sums", "ft", lambda library: summed(library, "never", [[SMALL, SMALL], [1, 0]]), KEPT),
    Row("order-of-sums", "ft", lambda library: summed(library, "always", [[SMALL, SMALL], [1, 0]]), KEPT),
    Row("recomputed-early", "f", recomputations, "B2 R1 B1 R0 B0"),
    Row("autograd-grad", "ft", lambda library: shares_of_gradients(library, "except_last"), [1.0] * 4),
    Row("autograd-grad", "ft", lambda library: shares_of_gradients(library, "always"), [1.0] * 4),
    Row("retain-graph", "t", retained, True),
    Row("create-graph", "ft", twice_differentiated, Raises("RuntimeError")),
    Row("parameter-hooks", "ft", hook_calls, 1),
    *(Row("in-place-layers", "ft", lambda library, each=each: in_place(library, *each), [[4.0] * 2] * 2)
      for each in ((False, False), (False, True), (True, False))),
    # It stays an error, as in the un-partitioned model: with PyTorch's message for that model.
    Row("in-place-input", "ft", lambda library: in_place(library, True, True),
        Raises("RuntimeError", text="a leaf Variable that requires")),
    Row("grad-mode", "ft",
        lambda library: watched(library, lambda x: (library.module().is_recomputing(), torch.is_grad_enabled()))[0],
        (False, True)),
    Row("no-grad", "ft", without_gradients, False),
    Row("evaluating-partitions", "ft", lambda library: recomputed_partitions(library, 0), [False, True]),
    Row("evaluating-partitions", "ft", lambda library: recomputed_partitions(library, 1), [True, False]),
    Row("settings-of-the-caller", "ft", settings, ["torch.bfloat16", True]),
    Row("random-numbers", "ft", random_state, [True, False, True, True]),
    Row("the-last-micro-batch", "ft",
        lambda library: watched(library, lambda x: library.module().is_recomputing(), nn.Linear(1, 1), chunks=4,
                                checkpoint="except_last", x=torch.ones(6, 1)).count(True), 2),
    Row("counted-twice", "ft", counted, [2, 2]),
    Row("workers-on-the-cpu", "ft", thread_count, 2),
    Row("deferred-variance", "ft", lambda library: deferred(library, 8), (6.0, 1)),
    Row("deferred-with-fewer-pieces", "ft", lambda library: deferred(library, 6), (3.5, 1)),
    Row("deferred-flag", "ft", lambda library: converted(library, nn.BatchNorm1d(2).eval()),
        ["DeferredBatchNorm", False]),
    Row("deferred-sync-batch-norm", "ft", lambda library: converted(library, nn.SyncBatchNorm(2))[0], "SyncBatchNorm"),
    Row("deferred-sums", "ft", lambda library: [*library.module("batchnorm").DeferredBatchNorm(2).state_dict()][5:],
        []),
    Row("exits", "ft", exiting, "exit 3"),
    Row("notes", "ft", notes, ["pipework: in layer '1' (Linear)", "pipework: stage 1, micro-batch 0, action F"]),
    Row("nested-skips", "ft",
        lambda library: library.module("skip").verify_skippables(nn.Sequential(skip_pair(library)[:1])),
        Raises("TypeError")),
    Row("skips-twice", "ft",
        lambda library: piped(library, *skip_pair(library, torch.zeros(2), torch.ones(2)))(torch.ones(4)),
        Raises("RuntimeError")),
    Row("skips-twice", "ft", lambda library: piped(library, *skip_pair(library, torch.ones(1), pops=2))(torch.ones(2)),
        Raises("RuntimeError")),
    Row("stashed-values", "ft", lambda library: skip_pair(library, 5)(torch.ones(2)), Raises("TypeError")),
    Row("stashed-values", "ft", lambda library: piped(library, *skip_pair(library, 5))(torch.ones(2)),
        Raises("TypeError")),
    Row("skip-names", "ft",
        lambda library: len(library.module("skip").skippable(stash="ab")(nn.Identity).stashable_names),
        Raises("TypeError")),
    Row("skip-names", "ft",
        lambda library: bool(skipping(library, ["a"]).isolate(library.module("skip").Namespace(), only=["b"])),
        Raises("ValueError")),
    Row("skip-checks", "ft", lambda library: skipping(library, ["a"], ["b"])(torch.ones(1)),
        Raises("RuntimeError", text="'a' must be stashed")),
    Row("skippable-attributes", "ft", attributes, []),
    Row("namespaces", "ft", namespaces, [False, False, False]),
    Row("stashes-of-a-layer-that-fails", "ft", stale, 2.0),
    Row("balance-device", "ft", lambda library: balanced(library, 1), [3]),
    Row("balance-by-size-on-the-cpu", "ft", lambda library: balanced(library, 1, "balance_by_size", device="cpu"), [3]),
    Row("balance-messages", "ft", lambda library: balanced(library, 9, timeout=0.01, device="cpu"),
        Raises("ValueError", text="cannot make 9 partitions of 3 layers: ask for at most 3")),
    Row("balance-messages", "ft", lambda library: library.Pipe(layers()),
        Raises("ValueError", text="import balance_by_time")),
    Row("the-best-balance", "ft", sum_of_largest_blocks, True),
]  # fmt: skip
# Rows without a test here: names that are missing, which `differential/test_surface.py` counts, and a script for whose
# end a test would wait. Nor have those of `torch.distributed.pipeline.sync` alone, which no longer runs.
ELSEWHERE = {"several-processes", "internal-modules", "end-of-a-script"}


@pytest.mark.parametrize("number", range(len(ROWS)), ids=lambda number: f"{number}-{ROWS[number].name}")
def test_difference(number: int) -> None:
    row = ROWS[number]
    if row.name == "balance-device" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    for letter in row.libraries:
        got = answer(row.ask, Library(LIBRARIES[letter], adapted=True))
        if isinstance(row.here, Tensor):
            assert torch.equal(got, row.here)
        else:
            assert row.here == got
            assert isinstance(got, bool) == isinstance(row.here, bool)


def test_the_page_has_these_rows() -> None:
    found = re.findall(r"^\| `([a-z-]+)` \| ([tfs ]+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(found) == len(dict(found)), "two rows have the same name"
    page = {name: {*letters.split()} - {"s"} for name, letters in found if name not in ELSEWHERE and letters != "s"}
    tests: dict[str, set[str]] = {}
    for row in ROWS:
        tests.setdefault(row.name, set()).update(row.libraries)
    assert page == tests
