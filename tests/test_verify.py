"""A pipe on a mini-batch of the user's own: right is found to be right, wrong is named, and nothing is changed."""

import copy
import itertools
import random
import re
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipework import Mesh, MicroBatches, NoChunk, Pipe, PipeWarning
from pipework.runtime.graphs import captured_steps
from pipework.runtime.graphs.captured_steps import GraphCount
from pipework.schedule import SCHEDULES
from pipework.verify import Verification
from tests.helpers import Pop, Stash, assert_same
from tests.integrations import tiny
from tests.model.parts.harness import attached
from tests.model.parts.models import Lists, ResNet, Vision, batch_of
from tests.runtime.graphs.recorded import RecordedGraphs

pytestmark = pytest.mark.filterwarnings("ignore::pipework.PipeWarning")

CHUNKS, ROWS, WIDTH, OUTPUTS = 4, 14, 4, 2
TRAINING = [name for name in SCHEDULES if name not in ("fill-drain", "forward-only")]
mse_loss = functional.mse_loss


def layers() -> list[nn.Module]:
    return [
        nn.Linear(WIDTH, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.5),
        nn.Linear(8, OUTPUTS),
    ]  # fmt: skip


def pipe_of(modules: Sequence[nn.Module], **options: Any) -> Pipe:
    half = len(modules) // 2
    settings = {"schedule": "1f1b", "loss_fn": mse_loss, "devices": ["cpu", "cpu"], **options}
    if SCHEDULES[settings["schedule"]].stages_per_worker == 1:
        settings.setdefault("balance", [half, len(modules) - half])
    return Pipe(nn.Sequential(*modules), CHUNKS, **settings)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, WIDTH), torch.randn(ROWS, OUTPUTS)


def verified(modules: Sequence[nn.Module], *inputs: Any, target: Any = None, **options: Any) -> Verification:
    x, y = batch()
    return pipe_of(modules, **options).verify(*(inputs or (x,)), target=y if target is None else target)


# ---- what is right ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "checkpoint"), [*zip(TRAINING, itertools.cycle(["always", "except_last", "never"]), strict=False)]
)
def test_every_schedule(schedule: str, checkpoint: str) -> None:
    x, y = batch()
    found = verified(layers(), x.requires_grad_(), target=y, schedule=schedule, checkpoint=checkpoint)
    assert found, found
    bitwise = [each for each in found.compared if each.against == "micro-batches"]
    assert [each.what for each in bitwise] == ["outputs", "loss", "gradients"]
    assert all(each.difference == 0 and each.bitwise for each in bitwise)
    assert bitwise[2].tensors == 7  # with that of the input
    whole = [each.what for each in found.compared if each.against == "whole batch"]
    assert whole == ["outputs, without dropout", "loss, without dropout", "gradients, without dropout"]


class Spread(nn.Module):
    def forward(self, x: Tensor, matrix: Tensor) -> Any:
        return x @ matrix, {"x": x}


class Gather(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, y: Tensor, others: dict[str, Tensor]) -> Any:
        return {"logits": self.linear(y) + others["x"][:, :OUTPUTS], "name": "kept"}


class WithLoss(nn.Linear):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return mse_loss(super().forward(x), target)


def tied() -> list[nn.Module]:
    layer = nn.Linear(WIDTH, WIDTH)
    return [layer, nn.Tanh(), layer, nn.Linear(WIDTH, OUTPUTS)]


def clamped() -> list[nn.Module]:
    modules = layers()
    modules[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return modules


def compiled() -> list[nn.Module]:
    modules = layers()
    modules[3].compile(backend="eager")
    return modules


def parts(width: int) -> MicroBatches:
    return MicroBatches([torch.randn(rows, width) for rows in (3, 5, 2)])


def logits_loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return mse_loss(output["logits"], target)


def by_rows(arguments: tuple[Any, ...], keywords: dict[str, Any], target: Any, chunks: int) -> list[Any]:
    return [((x,), {}, y) for x, y in zip(arguments[0].tensor_split(chunks), target.tensor_split(chunks), strict=True)]


def under_autocast() -> Verification:
    with torch.autocast("cpu", torch.bfloat16):
        return verified(layers())


OUTSIDE = {"schedule": "gpipe", "loss_fn": None}
RIGHT: dict[str, Callable[[], Any]] = {
    "tied": lambda: verified(tied(), balance=[2, 2]),
    "frozen": lambda: verified([nn.Linear(WIDTH, 8).requires_grad_(False), nn.Tanh(), nn.Linear(8, OUTPUTS)]),
    "skips": lambda: verified([Stash(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), Pop(), nn.Linear(WIDTH, OUTPUTS)]),
    "nested": lambda: verified(
        [Spread(), Gather()], batch()[0], NoChunk(torch.eye(WIDTH).requires_grad_()), loss_fn=logits_loss
    ),
    "nested, outside": lambda: pipe_of([Spread(), Gather()], **OUTSIDE).verify(
        batch()[0], NoChunk(torch.eye(WIDTH).requires_grad_())
    ),
    "outside": lambda: pipe_of(layers(), **OUTSIDE).verify(batch()[0].requires_grad_()),
    "an input that is no leaf": lambda: verified([nn.ReLU(inplace=True), *layers()], batch()[0].requires_grad_() * 2),
    "given": lambda: verified(layers(), parts(WIDTH), target=parts(OUTPUTS)),
    "given, outside": lambda: pipe_of(layers(), **OUTSIDE).verify(parts(WIDTH)),
    "last layer": lambda: verified([nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), WithLoss(WIDTH, OUTPUTS)], loss_fn=None),
    "sum": lambda: verified(layers(), loss_fn=nn.MSELoss(reduction="sum"), loss_reduction="sum"),
    "scaler": lambda: verified(layers(), grad_scaler=torch.amp.GradScaler("cpu", init_scale=1024.0)),
    "hook on a parameter": lambda: verified(clamped()),
    "compiled": lambda: verified(compiled()),
    "split": lambda: verified(layers(), split=by_rows),
    "autocast": under_autocast,
    "few rows": lambda: verified(layers(), torch.randn(1, WIDTH), target=torch.randn(1, OUTPUTS)),
    "bfloat16": lambda: verified(
        [each.bfloat16() for each in layers()], batch()[0].bfloat16(), target=batch()[1].bfloat16()
    ),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo, likewise
@pytest.mark.parametrize("case", RIGHT)
def test_forms_of_models_and_batches(case: str) -> None:
    found = RIGHT[case]()
    assert found, found
    assert (found.reasons, found.first) == ((), "")
    assert all(each.difference == 0 for each in found.compared if each.against == "micro-batches")


@pytest.mark.parametrize("outside", [False, True])
def test_in_evaluation_mode_there_are_no_gradients(outside: bool) -> None:
    x, y = batch()
    pipe = pipe_of(layers(), **(OUTSIDE if outside else {})).eval()
    found = pipe.verify(x, target=None if outside else y)
    assert found
    assert {each.what for each in found.compared} == {"outputs", *(["loss"] if not outside else [])}
    assert "evaluation mode" in found.notes[0]


# ---- what is wrong ---------------------------------------------------------------------------------------------------


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + random.random())


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counts = {"tokens": [0]}

    def forward(self, x: Tensor) -> Tensor:
        self.counts["tokens"][0] += x.numel()
        return x


class Late(nn.Module):
    """Gives something else on a thread that is not the main one: a fault that only a pipe shows."""

    def forward(self, x: Tensor) -> Tensor:
        return x if threading.current_thread() is threading.main_thread() else x * 1.5


class Masked(nn.Linear):
    """Its mask is one of all rows, and there are as many of its own as of the mini-batch."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x * mask.mean())


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output @ output.T, torch.arange(len(output)))


def summed(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def of_tokens(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.unflatten(1, (3, 2)).flatten(0, 1), target.flatten())


def token_layers() -> list[nn.Module]:
    return [nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 6)]


def padded_targets() -> Tensor:
    targets = torch.randint(0, 2, (ROWS, 3))
    targets[:4, 1:] = -100
    return targets


def around(layer: nn.Module) -> list[nn.Module]:
    return [nn.Linear(WIDTH, 8), nn.Tanh(), layer, nn.Linear(8, OUTPUTS)]


class Begin(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return x, mask


class Mixes(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x.softmax(0)


class Sum(nn.Module):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return (x - target).sum()


# Whether it is seen beside the plain model run micro-batch by micro-batch, what a reason says, where it begins.
WRONG: dict[str, tuple[Callable[[], Verification], bool, str, str]] = {
    "batch norm": (
        lambda: verified(around(nn.BatchNorm1d(8))),
        False, "batch norm in training mode normalises with the rows of its micro-batch: '2' (BatchNorm1d)",
        "layer '2' (BatchNorm1d): its output",
    ),
    "contrastive": (lambda: verified(layers(), loss_fn=contrastive), False, "compares rows with each other", ""),
    "sum": (
        lambda: verified(layers(), torch.randn(16, WIDTH), target=torch.randn(16, OUTPUTS), loss_fn=summed),
        False, "Perhaps the loss is a sum (give loss_reduction='sum')", "",
    ),
    "mean": (
        lambda: verified(
            layers(), torch.randn(16, WIDTH), target=torch.randn(16, OUTPUTS), loss_fn=mean, loss_reduction="sum"
        ),
        False, "a mean in spite of loss_reduction='sum'", "",
    ),
    "padding": (
        lambda: verified(token_layers(), target=padded_targets(), loss_fn=of_tokens),
        False, "it leaves out targets (give loss_weight=, such as", "",
    ),
    "rows by coincidence": (
        lambda: verified([Masked(WIDTH, OUTPUTS), nn.Tanh()], batch()[0], torch.randn(ROWS)),
        False, "NoChunk(value)", "layer '0' (Masked): its output",
    ),
    "a mask that layers hand on whole": (
        lambda: verified([Begin(), Mixes(), nn.Linear(WIDTH, OUTPUTS)], batch()[0], NoChunk(torch.ones(3, 3))),
        False, "a layer mixes rows", "layer '1' (Mixes): its output",
    ),
    "a function that loses rows": (
        lambda: verified(layers(), split=lambda *call: by_rows(*call)[:-1]), False, "split= say what each one gets", "",
    ),
    "a dict that counts": (
        lambda: verified([nn.Linear(WIDTH, 8), Counting(), nn.Tanh(), nn.Linear(8, OUTPUTS)], checkpoint="always"),
        True, "1.counts['tokens'][0], in an attribute, which a recomputation changes once more", "",
    ),
    "Python's random": (
        lambda: verified(around(Noise())),
        True, "draws numbers outside of PyTorch (random, NumPy)", "micro-batch 0, layer '2' (Noise): its output",
    ),
    "a fault in one stage": (
        lambda: verified(around(Late())),
        True, "reads what depends on the thread", "micro-batch 0, layer '2' (Late): its output",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case: str) -> None:
    call, bitwise, reason, place = WRONG[case]
    found = call()
    assert not found
    wrong = {each.against for each in found.compared if each.first}
    assert ("micro-batches" in wrong or "itself, again" in wrong) is bitwise, found
    assert reason in str(found)
    assert found.first == place
    assert "DIFFERS" in str(found)


def test_what_was_not_compared_is_said() -> None:
    with torch.no_grad():
        assert any("torch.no_grad()" in note for note in verified(layers()).notes)
    frozen = [layer.requires_grad_(False) for layer in layers()]
    assert any("no parameter requires a gradient" in note for note in verified(frozen).notes)


def test_a_last_layer_that_returns_a_sum() -> None:
    found = verified([*layers(), Sum()], loss_fn=None)
    assert any("takes the mean by rows" in reason for reason in found.reasons), found


def test_a_factor_of_the_loss_is_left_out() -> None:
    for options in ({"loss_scale": 0.5}, {"return_output": True}):
        with pytest.raises(ValueError, match=rf"got {next(iter(options))}=, .*: leave it out"):
            pipe_of(layers()).verify(batch()[0], target=batch()[1], **options)


def test_deferred_batch_norm_has_the_statistics_of_the_whole_batch() -> None:
    found = verified(around(nn.BatchNorm1d(8)), deferred_batch_norm=True)
    of_buffers = {each.against: each.verdict for each in found.compared if each.what.startswith("buffers")}
    assert of_buffers == {"micro-batches": "equal", "whole batch": "equal up to rounding"}
    assert "normalises with the rows of its micro-batch" in found.reasons[0]


class Inexact(torch.autograd.Function):
    """Changes each element a little, by numbers that PyTorch does not know, in the forward or in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.size = backward
        return _disturbed(x, forward)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return _disturbed(gradient, ctx.size), None, None


def _disturbed(x: Tensor, size: float) -> Tensor:
    draw = torch.Generator().manual_seed(random.getrandbits(40))
    return x * (1 + size * torch.rand(x.shape, generator=draw))


class Unordered(nn.Module):
    """As kernels that add in any order."""

    def __init__(self, forward: float, backward: float, calls: list[str]) -> None:
        super().__init__()
        self.run = lambda x: Inexact.apply(x, forward, backward)  # type: ignore[no-untyped-call]
        self.note = lambda: calls.append(threading.current_thread().name)

    def forward(self, x: Tensor) -> Tensor:
        self.note()
        return self.run(x)


class LateBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient if threading.current_thread() is threading.main_thread() else gradient * 1.5


class WrongBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return LateBackward.apply(x)  # type: ignore[no-untyped-call]


def inexact(forward: float, backward: float, *others: nn.Module) -> tuple[Verification, int]:
    """What is found, and how many micro-batches the plain model has run."""
    random.seed(0)
    calls: list[str] = []
    unordered = Unordered(forward, backward, calls)
    found = verified([nn.Linear(WIDTH, 8), nn.Tanh(), unordered, *others, nn.Linear(8, OUTPUTS)])
    return found, calls.count(threading.main_thread().name)


@pytest.mark.parametrize(("forward", "backward"), [(1e-3, 0.0), (0.0, 1e-3), (1e-6, 0.0)])
def test_what_the_plain_model_differs_from_itself_is_allowed(forward: float, backward: float) -> None:
    found, calls = inexact(forward, backward)
    assert found, found
    assert str(found).startswith("the pipe equals the plain model as far as that equals itself\n")
    (own,) = [each for each in found.compared if each.against == "itself, again"]
    assert 0.1 * (forward + backward) < own.difference < 20 * (forward + backward)
    assert own.verdict == "differs from itself"
    note = next(each for each in found.notes if each.startswith("run twice, the plain model differs"))
    numbers = re.findall(r"(\S+) in (\w+) \((\S+) was allowed\)", note)
    assert {kind for _, kind, _ in numbers} == {"gradients", *(("outputs", "loss") if forward else ())}
    for most, _, allowed in numbers:
        assert float(allowed) == pytest.approx(max(4 * float(most), 1e-4), rel=0.05)
    assert calls == 2 * CHUNKS + 1
    beside = {each.what: each for each in found.compared if each.against == "micro-batches"}
    assert beside["gradients"].verdict == "within what the plain model differs from itself"
    assert beside["outputs"].bitwise is beside["loss"].bitwise is (not forward)
    assert not beside["gradients"].bitwise


class SlightlyLate(nn.Module):
    """As `Late`, by less than what a backward in 16 bits differs from itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x if threading.current_thread() is threading.main_thread() else x * 1.001


def test_what_the_plain_model_gives_again_stays_bitwise() -> None:
    found, _ = inexact(0.0, 1e-3, SlightlyLate())
    assert not found
    wrong = {each.what for each in found.compared if each.first and each.against == "micro-batches"}
    assert {"outputs", "loss"} <= wrong
    assert found.first == "micro-batch 0, layer '3' (SlightlyLate): its output"


def test_a_model_too_far_from_itself_is_not_compared() -> None:
    found, _ = inexact(1.0, 0.0)
    assert not found
    assert {each.against for each in found.compared} == {"itself, again"}
    most = max(each.difference for each in found.compared)
    assert str(found).startswith(f"not compared: the plain model differs from itself by {most:.2g}\n")
    assert "differs too much from itself" in found.reasons[0]


@pytest.mark.parametrize(("forward", "backward"), [(1e-3, 0.0), (0.0, 1e-3)])
@pytest.mark.parametrize("wrong", [Late, WrongBackward])
def test_a_fault_is_found_beside_what_the_plain_model_differs_from_itself(
    wrong: type[nn.Module], forward: float, backward: float
) -> None:
    found, _ = inexact(forward, backward, wrong())
    assert not found
    assert {each.against for each in found.compared if each.first} == {"micro-batches", "whole batch"}
    assert "reads what depends on the thread" in found.reasons[0]
    place = "layer '3' (Late): its output" if wrong is Late else "layer '2' (Unordered): the gradient of its output"
    assert found.first == f"micro-batch 0, {place}"


def test_the_plain_model_runs_again_only_where_bits_differ() -> None:
    found, calls = inexact(0.0, 0.0)
    assert found
    assert {each.against for each in found.compared} == {"micro-batches", "whole batch"}
    assert found.notes == ()
    assert calls == CHUNKS + 1


# ---- nothing is changed ----------------------------------------------------------------------------------------------


class Stateful(nn.Module):
    """Has all kinds of state."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.seen: list[int] = []
        self.sums = {"all": torch.zeros(())}
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(x))
        self.sums["all"] += x.detach().sum()
        self.last = x.detach()
        random.random()
        return self.norm(x)


def state_of(pipe: Pipe, x: Tensor) -> list[Any]:
    modules = [*pipe.modules()]
    return [
        [tensor.clone() for tensor in pipe.state_dict().values()],
        [id(tensor) for tensor in (*pipe.parameters(), *pipe.buffers())],
        [(id(each.grad), None if each.grad is None else each.grad.clone()) for each in (*pipe.parameters(), x)],
        [module.training for module in modules],
        [{name: dict(value) for name, value in vars(module).items() if "hooks" in name} for module in modules],
        [sorted(vars(module)) for module in modules],
        [
            (each.calls, id(each.seen), list(each.seen), each.sums["all"].clone())
            for each in modules
            if isinstance(each, Stateful)
        ],
        torch.get_rng_state(),
        random.getstate(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        {name: value for name, value in vars(pipe._executor).items() if name not in ("_programs", "_engine_lock")},
        id(pipe._executor),
        copy.copy(vars(pipe._executor.doubts)),
    ]


class Failing(nn.Module):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails and x.requires_grad and torch.is_grad_enabled() and len(x) == 3:
            raise RuntimeError("as asked")
        return x


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_all_is_left_as_it_was(schedule: str, fails: bool) -> None:
    x, y = batch()
    failing = Failing()
    modules = [nn.Linear(WIDTH, 8), Stateful(), nn.Dropout(0.3), failing, nn.BatchNorm1d(8).eval(), nn.Linear(8, 2)]
    modules[0].register_forward_hook(lambda *_: None)
    modules[5].weight.register_post_accumulate_grad_hook(lambda parameter: pytest.fail("this is no step"))
    modules[0].bias.grad = torch.ones(8)
    pipe = pipe_of(modules, schedule=schedule, checkpoint="always")
    x.requires_grad_()
    before = state_of(pipe, x)
    failing.fails = fails
    if fails:
        with pytest.raises(RuntimeError, match="as asked"):
            pipe.verify(x, target=y)
    else:
        pipe.verify(x, target=y)
    failing.__dict__.pop("fails", None)
    assert_same(state_of(pipe, x), before)


def test_what_is_to_be_warned_of_is_warned_of_later() -> None:
    x, y = batch()
    pipe = pipe_of(layers(), loss_fn=contrastive)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not pipe.verify(x, target=y)
    with pytest.warns(PipeWarning):
        pipe(x, target=y)


def test_layers_are_needed() -> None:
    with pytest.raises(ValueError, match="without layers"):
        Pipe(nn.Sequential(), devices=["cpu"]).verify(torch.ones(2))


def test_its_workers_end_with_it(own_workers: Callable[[], list[threading.Thread]]) -> None:
    x, y = batch()
    pipe = pipe_of(layers())
    assert pipe.verify(x, target=y)
    assert own_workers() == []


# ---- with graphs ----------------------------------------------------------------------------------------------------


class Steps:
    """A number inside an object, which graphs are not compared with."""

    number = 0


class Growing(nn.Module):
    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self.steps = [steps]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.steps[0].number


class Noted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(1)
        return x


class Waits(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert x.isfinite().all().item()
        return x


def with_norm() -> list[nn.Module]:
    return [*layers()[:2], nn.BatchNorm1d(8), *layers()[2:]]


def trained(pipe: Pipe, steps: int, changes: Callable[[], object] = int) -> None:
    x, y = batch()
    for _ in range(steps):
        changes()
        pipe(x, target=y)
    changes()


@pytest.mark.usefixtures("recorded_graphs")
@pytest.mark.parametrize("steps", [0, 3, 7])  # before the pipe is verified: it has captured nothing, or its own step
@pytest.mark.parametrize("deferred", [False, True])
def test_graphs_are_compared_and_stay_as_they_are(steps: int, deferred: bool) -> None:
    pipe = pipe_of(with_norm(), graphs=True, checkpoint="always", deferred_batch_norm=deferred)
    twin, before, (x, y) = copy.deepcopy(pipe), None, batch()
    for each in (twin, pipe):
        torch.manual_seed(1)
        trained(each, steps)
        if each is pipe:
            before = pipe.graphs if steps else None
            found = pipe.verify(x, target=y)
            assert pipe.graphs == (before or GraphCount())
        trained(each, 9 - steps)
    replayed = {each.what: each.difference for each in found.compared if "replayed" in each.what}
    kinds = ["outputs", "loss", "gradients", "buffers"][steps == 7 :]  # a step without outputs was captured
    assert replayed == {f"{kind}, replayed": 0 for kind in kinds}
    assert pipe.graphs == (
        1,
        4,
        4,
        "the first 4 mini-batches of each form, and one after a change of layers, run without graphs",
    )
    assert_same([*pipe.state_dict().values()], [*twin.state_dict().values()])


@pytest.mark.usefixtures("recorded_graphs")
@pytest.mark.parametrize("where", ["layer", "loss"])
def test_what_a_graph_keeps_of_python_is_found(where: str) -> None:
    steps, numbers = Steps(), list[int]()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output, target) * len(numbers)

    def changes() -> None:
        steps.number += 1
        numbers.append(1)

    options = {"loss_fn": loss_fn} if where == "loss" else {}
    modules = layers() if where == "loss" else [Growing(steps), *layers()]
    pipe = pipe_of(modules, graphs=True, **options)
    trained(pipe, 7, changes)
    x, y = batch()
    found = pipe.verify(x, target=y)
    assert not found
    assert {each.what for each in found.compared if each.first} == {"loss, replayed", "gradients, replayed"}
    assert "a graph keeps what Python read when it was captured" in found.reasons[0]
    assert pipe.graphs is not None
    assert pipe.graphs.captured == 1


@pytest.mark.usefixtures("recorded_graphs")
def test_graphs_of_an_attached_model() -> None:
    model = Lists()
    pipe = attached(model, batch_of(Lists), chunks=CHUNKS, graphs=True)  # its outputs are wanted everywhere
    for _ in range(6):
        model(**batch_of(Lists))
    found = pipe.verify(**batch_of(Lists))
    assert found, found
    assert [each.what for each in found.compared if "replayed" in each.what] == [
        "loss, replayed",
        "gradients, replayed",
    ]


@pytest.mark.usefixtures("recorded_graphs")
def test_python_that_replays_leave_out_is_found() -> None:
    found = verified([*layers(), Noted()], graphs=True)
    assert [each.first for each in found.compared if each.first] == ["7.seen[0]"]


@pytest.mark.usefixtures("recorded_graphs")
def test_runs_without_graphs_are_named() -> None:
    def notes(modules: list[nn.Module], **options: Any) -> str:
        found = verified(modules, **options)
        assert found, found
        assert not any("replayed" in each.what for each in found.compared)
        return found.notes[-1]

    assert "all runs were without graphs" in notes([*layers(), Waits()], graphs="auto")
    assert "graphs are of training steps" in notes([each.eval() for each in layers()], graphs=True)
    with pytest.raises(RuntimeError, match="capturing"):
        verified([*layers(), Waits()], graphs=True)


# ---- attached --------------------------------------------------------------------------------------------------------


def test_a_llama_is_compared_with_its_own_forward() -> None:
    model = tiny.llama()
    pipe, rows = tiny.pipe_of(model), tiny.batch(8)
    before = copy.deepcopy(model.state_dict())
    found = pipe.verify(**rows)
    assert found, found
    assert [each.tensors for each in found.compared if each.what == "gradients"] == [21]
    model.config.attention_dropout = 0.2
    assert pipe.verify(**rows)
    assert_same(model.state_dict(), before)
    torch.manual_seed(1)
    model.eval()
    found = pipe.verify(**rows)
    assert found
    assert "evaluation mode" in str(found)


def test_a_weight_of_labels_that_is_wrong() -> None:
    rows = tiny.batch(8)
    rows["labels"][:2, 2:] = -100
    found = tiny.pipe_of(tiny.llama(), loss_weight=len).verify(**rows)
    assert not found
    assert "loss_weight=" in str(found)


@pytest.mark.parametrize("kind", [Vision, Lists])
def test_models_that_are_cut_as_they_are(kind: Any) -> None:
    model = Vision(p=0.5) if kind is Vision else kind()
    found = attached(model, batch_of(kind), chunks=CHUNKS).verify(**batch_of(kind))
    assert found, found
    rounded = {each.what for each in found.compared if each.against == "micro-batches" and each.difference}
    assert rounded == ({"gradients"} if kind is Lists else set())  # see "Where it ends"


def test_norms_of_an_attached_model() -> None:
    found = attached(ResNet(), batch_of(ResNet), chunks=CHUNKS).verify(**batch_of(ResNet))
    assert not found
    assert "'bn1' (BatchNorm2d)" in found.reasons[0]
    assert found.first == "layer 'bn1' (BatchNorm2d): its output"


# ---- in several processes --------------------------------------------------------------------------------------------


class Broken(nn.Module):
    """Raises an error in the plain run alone."""

    def forward(self, x: Tensor) -> Tensor:
        if threading.current_thread() is threading.main_thread():
            raise RuntimeError("as asked")
        return x


def on_each_rank(mesh: Mesh) -> Any:
    warnings.simplefilter("ignore", PipeWarning)
    results: list[Any] = []

    def found(modules: list[nn.Module], target: Any, *inputs: Any, **options: Any) -> Verification:
        settings = {"schedule": "1f1b", "loss_fn": mse_loss, "checkpoint": "always", **options}
        torch.manual_seed(1 + mesh.rank)  # generators differ
        pipe = Pipe(nn.Sequential(*modules), 2, mesh=mesh, **settings)
        before = [torch.get_rng_state(), *pipe.state_dict().values()]
        result = pipe.verify(*inputs, target=target)
        assert_same([torch.get_rng_state(), *pipe.state_dict().values()], before)
        if target is not None:
            pipe(*inputs, target=target).backward()
        return result

    torch.manual_seed(0)
    x, y = batch()
    for options in ({"schedule": "zb-v"}, {"schedule": "gpipe", "loss_fn": None}):
        results.append(found(layers(), None if "loss_fn" in options else y, x.requires_grad_(), **options))
    stacked = [Stash(), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Tanh(), Pop(), nn.Linear(WIDTH, OUTPUTS)]
    results += [found(stacked, y, x, balance=[2, 4]), found(tied(), y, x, balance=[2, 2])]
    results += [found([nn.Linear(WIDTH, 8), Unordered(1e-3, 0.0, []), nn.Tanh(), nn.Linear(8, OUTPUTS)], y, x)]
    allowed = str(results[-1])
    with mock.patch.multiple(captured_steps, can_capture=lambda device: True, Graphs=lambda device: RecordedGraphs()):
        results.append(found(layers(), y, x.requires_grad_(), graphs=True))
    assert sum("replayed" in each.what for each in results[-1].compared) == 3
    results.append(attached(Vision(p=0.5), batch_of(Vision), devices=None, mesh=mesh, checkpoint="always"))
    results[-1] = results[-1].verify(**batch_of(Vision))
    right = [str(each) for each in results if not each]
    wrong = [
        found(around(nn.BatchNorm1d(8)), y, x, balance=[2, 2]),
        found([nn.Linear(WIDTH, 8), Counting(), nn.Tanh(), nn.Linear(8, OUTPUTS)], y, x, balance=[2, 2]),
    ]
    try:
        found([nn.Linear(WIDTH, 8), Broken(), nn.Tanh(), nn.Linear(8, OUTPUTS)], y, x, balance=[2, 2])
    except RuntimeError as error:
        wrong.append(str(error))
    try:
        found(layers(), y, x.detach() + mesh.rank)
    except ValueError as error:
        wrong.append(str(error))
    return right, [str(each) for each in wrong], [bool(each) for each in wrong[:2]], allowed


@pytest.mark.thorough
def test_in_several_processes(on_ranks: Callable[..., list[Any]]) -> None:
    first, second = on_ranks(2, on_each_rank)
    right, wrong, verdicts, allowed = first
    assert not right, "\n".join(right)
    assert verdicts == [False, False]
    assert second[0] == []
    assert second[2] == verdicts
    assert second[1][:2] == wrong[:2]  # the same table everywhere
    assert second[3] == allowed
    assert "run twice, the plain model differs from itself by up to" in allowed
    assert "'2' (BatchNorm1d)" in wrong[0]
    assert "first difference: layer '2' (BatchNorm1d): its output" in wrong[0]
    assert "1.counts['tokens'][0]" in wrong[1]
    assert wrong[2] == "as asked"
    assert second[1][2] == "rank 0 could not run its layers for pipe.verify: RuntimeError: as asked"
    assert "give all of them, replicas too, the same batch" in wrong[3] == second[1][3]
