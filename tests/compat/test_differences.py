"""What the adapters of torchgpipe and fairscale answer where these libraries answer otherwise.

They are rows of `docs/compat_differences.md`, which have the same names. In the other rows the adapters do what
`pipework.Pipe` does, whose tests have them.
"""

import copy
import re
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
    # A constant before the tensor with the bias: its gradient.
    Row("a-constant-first", "ft",
        lambda library: bias_gradient(library, lambda x: (x.detach(), x), lambda pair: pair[1] + 0 * pair[0],
                                      checkpoint="except_last"), [4.0, 4.0]),
    # From the last micro-batch to the first; to what was there; with two uses in each micro-batch.
    Row("order-of-sums", "ft", lambda library: summed(library, "never", [[1, 0], [SMALL, 0], [SMALL, 0]]), KEPT),
    Row("order-of-sums", "ft", lambda library: summed(library, "never", [[SMALL, 0], [SMALL, 0]], 1.0), KEPT),
    Row("order-of-sums", "ft", lambda library: summed(library, "always", [[SMALL, 0], [SMALL, 0]], 1.0), KEPT),
    Row("order-of-sums", "ft", lambda library: summed(library, "never", [[SMALL, SMALL], [1, 0]]), KEPT),
    Row("order-of-sums", "ft", lambda library: summed(library, "always", [[SMALL, SMALL], [1, 0]]), KEPT),
    Row("recomputed-early", "f", recomputations, "B2 R1 B1 R0 B0"),
    Row("the-last-micro-batch", "ft",
        lambda library: watched(library, lambda x: library.module().is_recomputing(), nn.Linear(1, 1), chunks=4,
                                checkpoint="except_last", x=torch.ones(6, 1)).count(True), 2),
    Row("workers-on-the-cpu", "ft", thread_count, 2),
    Row("deferred-with-fewer-pieces", "ft", lambda library: deferred(library, 6), (3.5, 1)),
    Row("nested-skips", "ft",
        lambda library: library.module("skip").verify_skippables(nn.Sequential(skip_pair(library)[:1])),
        Raises("TypeError")),
    Row("skippable-attributes", "ft", attributes, []),
    Row("namespaces", "ft", namespaces, [False, False, False]),
    Row("stashes-of-a-layer-that-fails", "ft", stale, 2.0),
    Row("balance-device", "ft", lambda library: balanced(library, 1), [3]),
    Row("balance-by-size-on-the-cpu", "ft", lambda library: balanced(library, 1, "balance_by_size", device="cpu"), [3]),
    Row("balance-messages", "ft", lambda library: library.Pipe(layers()),
        Raises("ValueError", text="import balance_by_time")),
]  # fmt: skip


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
    page = {name: {*letters.split()} - {"s"} for name, letters in found}
    for row in ROWS:
        assert {*row.libraries} <= page[row.name], row.name
