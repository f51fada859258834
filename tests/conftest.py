"""What every test relies on: one intra-op thread, a fixed seed, accelerators only where there are some.

And what several folders share: one training of the un-pipelined model and of a pipe, compared step by step.
"""

import contextvars
import copy
import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

from pipework import Pipe
from pipework.doubts import Doubts
from pipework.runtime.graphs import captured_steps
from pipework.runtime.stage import stage
from pipework.schedule import SCHEDULES, build
from pipework.schedule.placement import wave_placement
from pipework.testing import Reference, draw_key, reference_backward, reference_step
from tests.jobs import crews as crews
from tests.jobs import on_ranks as on_ranks
from tests.jobs import start as start
from tests.nursery import Nursery
from tests.programs import run_python as run_python
from tests.programs import run_ranks as run_ranks
from tests.programs import start_python as start_python
from tests.ranks import RankPipe, held, own_mesh, recut, workers_of
from tests.runtime.graphs.recorded import RecordedGraphs
from tests.tiers import mark_thorough

# How long an example takes says more about what else the machine does than about the code.
settings.register_profile("pipework", deadline=None)
# Ranks that run one test together must draw the same examples.
settings.register_profile("ranks", deadline=None, derandomize=True, database=None)
settings.load_profile("pipework" if own_mesh() is None else "ranks")


@pytest.hookimpl(tryfirst=True)  # before pytest looks at what -m asks for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Says what `make test` runs, and skips tests marked ``gpu`` on a machine without an accelerator."""
    mark_thorough(items)
    if torch.accelerator.is_available():
        return
    skip = pytest.mark.skip(reason="needs an accelerator, and torch.accelerator.is_available() is False")
    for item in items:
        if item.get_closest_marker("gpu"):  # its keywords have the names of folders, too
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Collections of garbage in tests leave alone what is there before the first test: a million objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def recorded_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are captured on the CPU, as operators that a stand-in of a device's graphs records."""
    monkeypatch.setattr(captured_steps, "can_capture", lambda device: True)
    monkeypatch.setattr(captured_steps, "Graphs", lambda device: RecordedGraphs())


@pytest.fixture
def captured_soon(recorded_graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `recorded_graphs`; the second mini-batch is captured, and not the fifth."""
    monkeypatch.setattr(captured_steps, "FIRST", 1)
    monkeypatch.setattr(stage, "MINI_BATCHES", 1)
    monkeypatch.setattr(Doubts, "looks_at_layers", lambda doubts, batch: False)
    monkeypatch.setattr(Doubts, "of_targets", lambda doubts, batch, settings, graphs: None)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Bitwise comparisons need a fixed number of intra-op threads, because sums depend on how work is divided."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def compiles_first() -> None:
    """Without a GPU, the CUDA build of PyTorch 2.11 crashes once the first thread that has compiled has ended."""
    torch._C._ensureCUDADeviceGuardSet()  # which compiling calls


@pytest.fixture(scope="session")
def nurseries() -> Iterator[list[Nursery]]:
    """Where ranks come from, as tests/jobs.py starts them; without the first rank, nothing is there."""
    both = [Nursery(seed) for seed in (1, 2)]
    yield both
    for each in both:
        each.close()


@pytest.fixture
def own_workers() -> Callable[[], list[threading.Thread]]:
    """Lists the workers' threads that were started since the test began and are still there."""
    gc.collect()
    earlier = set(threading.enumerate())

    def started() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name.startswith("pipework worker") and t not in earlier]

    return started


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test starts from the same random state."""
    torch.manual_seed(0)


Same = Callable[[Tensor, Tensor], None]


def square_mean(output: Tensor) -> Tensor:
    return output.to(torch.promote_types(output.dtype, torch.float32)).square().mean()


def bitwise(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.to(expected.device), expected, rtol=0, atol=0)


def distance(output: Tensor, target: Tensor) -> Tensor:
    """A mean loss for outputs of any shape; its target has one number for each row."""
    return square_mean(output.flatten(1) - target[:, None].to(output.dtype))


@dataclass(frozen=True)
class Way:
    """A way to train with a pipe: under which schedule, and where the loss is computed.

    The methods hide the difference, so that one test body is run in every way.
    """

    schedule: str = "gpipe"
    inside: bool = True

    def pipe(
        self,
        module: nn.Sequential,
        chunks: int,
        checkpoint: str = "except_last",
        *args: Any,
        balance: Sequence[int],
        loss_fn: Callable[[Any, Any], Tensor] | None = distance,
        share: bool = False,
        **options: Any,
    ) -> Pipe:
        """A pipe of a copy, or if `share` of the module itself; with several stages per worker if the schedule has.

        Where several ranks run a test, they are the workers, and the balance is cut again for their number.
        """
        known = SCHEDULES[self.schedule]
        own = module if share else copy.deepcopy(module)
        options.update(schedule=self.schedule, loss_fn=loss_fn)
        mesh = own_mesh()
        if mesh is not None:
            balance = recut(balance, len(mesh.ranks) * known.stages_per_worker)
            return RankPipe(own, chunks, checkpoint, *args, balance=balance, mesh=mesh, **options)
        if known.placement is wave_placement and len(balance) % 2:
            # There and back again is an even number of stages.
            *rest, last = balance
            balance = [*rest[:-1], rest[-1] + last] if rest else [1, last - 1]
        workers = len(balance)
        if known.stages_per_worker == 2:
            workers = 1 if workers % 2 else workers // 2
        return Pipe(own, chunks, checkpoint, *args, balance=balance, **workers_of(workers), **options)

    def named(self, kind: str) -> str:
        """What an action of this kind is called in errors: where backwards are split, hooks run in the first half."""
        split = self.inside and any(a.kind == "I" for a in build(self.schedule, workers=2, chunks=2).orders[0])
        return "I" if kind == "B" and split else kind

    def run(
        self,
        pipe: Pipe,
        inputs: Tensor | tuple[Tensor, ...],
        target: Any,
        loss_fn: Callable[[Any, Any], Tensor] = distance,
        **keywords: Any,
    ) -> tuple[Tensor, Any]:
        """The loss of a mini-batch, and the output."""
        arguments = inputs if isinstance(inputs, tuple) else (inputs,)
        if self.inside:
            return pipe(*arguments, **keywords, target=target, return_output=True)
        output = pipe(*arguments, **keywords)
        if isinstance(output, Tensor) and isinstance(target, Tensor):
            target = target.to(output.device)
        return loss_fn(output, target), output

    def loss(
        self,
        pipe: Pipe,
        inputs: Tensor | tuple[Tensor, ...],
        target: Any,
        loss_fn: Callable[[Any, Any], Tensor] = distance,
        **keywords: Any,
    ) -> Tensor:
        """The loss alone."""
        if self.inside:
            return pipe(*(inputs if isinstance(inputs, tuple) else (inputs,)), **keywords, target=target)
        return self.run(pipe, inputs, target, loss_fn, **keywords)[0]

    def reference(
        self,
        plain: nn.Sequential,
        inputs: Tensor | tuple[Tensor, ...],
        target: Any,
        chunks: int,
        key: int,
        loss_fn: Callable[[Any, Any], Tensor] = distance,
    ) -> Reference:
        """What the un-pipelined model makes of it."""
        if self.inside:
            return reference_step(plain, inputs, target, loss_fn, chunks, key)
        return reference_backward(plain, inputs, lambda output: loss_fn(output, target), chunks, key)


WAYS = {"outside": Way(inside=False)} | {
    name: Way(name) for name in SCHEDULES if name not in ("fill-drain", "forward-only")
}


# Where a test names none: every form of a step, with backwards whole and in halves.
USUAL = ("outside", "gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-v")


CHECKPOINT_MODES = ("never", "except_last", "always")


@pytest.fixture(params=CHECKPOINT_MODES)
def checkpoint(request: pytest.FixtureRequest) -> str:
    """Runs a test in every mode, unless it names some itself."""
    return request.param


@pytest.fixture(params=USUAL)
def way(request: pytest.FixtureRequest) -> Way:
    """Runs a test in every way, or in those that it names with `parametrize("way", [...], indirect=True)`."""
    return WAYS[request.param]


def named_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_trained_alike(
    plain: nn.Sequential,
    pipe: Pipe,
    batches: Iterable[tuple[Tensor, ...]],
    *,
    way: Way = WAYS["outside"],
    same: Same = bitwise,
    before_step: Callable[[nn.Module, int], None] = lambda model, step: None,
    evaluate: bool = False,
    buffers: bool = True,
) -> None:
    """Trains both and compares outputs, losses and gradients of each step, then all parameters and buffers.

    Args:
        plain: the un-pipelined model.
        pipe: of a copy of it. If its workers are processes, each compares what it holds.
        batches: a mini-batch for each step.
        way: in which the pipe is trained.
        same: how everything is compared, but for the output of the first step: that is bitwise equal in any case.
        before_step: called with each of the models and the number of the step.
        evaluate: whether the pipe alone is also run in evaluation mode, before and after each backward.
        buffers: whether buffers are compared, too.
    """
    # In a group, because there may be no parameter at all in this process.
    optimizers = [torch.optim.AdamW([{"params": model.parameters()}], lr=0.01) for model in (plain, pipe)]
    plain_here = held(plain, pipe)

    def look(inputs: tuple[Tensor, ...]) -> None:
        if evaluate:
            pipe.eval()
            with torch.no_grad():
                pipe(*inputs)
            pipe.train()

    for step, inputs in enumerate(batches):
        target = torch.randn(len(inputs[0]))
        for model in (plain, pipe):
            before_step(model, step)
        torch.manual_seed(step)
        reference = way.reference(plain, inputs, target, pipe.chunks, draw_key())
        torch.manual_seed(step)
        loss, output = way.run(pipe, inputs, target)
        look(inputs)
        loss.backward()
        look(inputs)
        for actual, expected in ((output, reference.output), (loss, reference.loss)):
            (bitwise if step == 0 else same)(actual, expected)
        gradients = named_gradients(pipe)
        for name, expected in named_gradients(plain_here).items():
            same(gradients.pop(name), expected)
        assert not gradients, f"only the pipe has gradients of {list(gradients)} in step {step}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, expected in plain_here.named_parameters():
        same(pipe.get_parameter(name), expected)
    if buffers:
        states = [model.state_dict() for model in (plain_here, pipe)]
        assert list(states[0]) == list(states[1])
        for expected, actual in zip(*map(dict.values, states), strict=True):
            same(actual, expected)


@pytest.fixture(name="assert_trained_alike")
def _assert_trained_alike() -> Callable[..., None]:
    """See the function: fixtures are how tests get what is defined here."""
    return assert_trained_alike


@pytest.fixture
def variables_given(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """For each thread that is started, whether it could be given the variables that the caller has set.

    Since Python 3.14 a thread may get a copy of those that are set where it is started.
    """
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    start, given = threading.Thread.start, []

    def noted(thread: threading.Thread) -> None:
        given.append(variable in contextvars.copy_context())
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    token = variable.set("large")
    yield given
    variable.reset(token)
