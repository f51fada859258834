"""Steps that begin in the backward: bit for bit those of `backward()` and `step()`, or an error."""

import contextlib
import copy
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pipework import HostOptimizer, Pipe, load_checkpoint, save_checkpoint
from pipework.runtime import early_steps
from pipework.runtime.early_steps import EarlySteps
from pipework.runtime.host_link import HostLink
from tests.helpers import assert_same


class Query(nn.Module):
    """Its output is a parameter, which the next stage keeps for a W."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.rows.expand(x.shape[0], -1)


class Detached(Query):
    """Its second output is the same parameter, from which no gradient comes back."""

    def forward(self, x: Tensor) -> Any:
        return x + self.rows, self.rows.detach().expand(x.shape[0], -1)


class Projected(nn.Module):
    """Its weight's gradient reads the second input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        return x + self.linear(rows)


class Fails(nn.Module):
    """Fails in a backward, if it is told to, when so many micro-batches of the last one have gone backward."""

    left = -1

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(self.fail)
        return x * 1

    def fail(self, gradient: Tensor) -> None:
        self.left -= 1
        if self.left == 0:
            raise ArithmeticError("on purpose")


def layers(*before: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(3))
    return nn.Sequential(*(make() for make in before), *blocks, nn.Linear(8, 8))


def make_pipe(module: nn.Sequential | None = None, **options: Any) -> Pipe:
    module = layers() if module is None else module
    options = {"chunks": 4, "balance": [1] * len(module), "schedule": "1f1b", "loss_fn": mse_loss} | options
    options.setdefault("devices", ["cpu"] * (2 if "v" in options["schedule"] else len(module)))
    return Pipe(module, deferred_batch_norm=True, **options)


def data(step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)


def loss_of(pipe: Pipe, step: int = 0, inside: bool = True) -> Tensor:
    x, y = data(step)
    result: Tensor = pipe(x, target=y) if inside else mse_loss(pipe(x), y)
    return result


def backward(pipe: Pipe, step: int, inside: bool = True) -> None:
    loss_of(pipe, step, inside).backward()


Way = Callable[[Pipe, int], None]
make_optimizer: Any = partial(HostOptimizer, optimizer_class=torch.optim.AdamW, lr=0.1, fused=True)


def state_of(pipe: Pipe, optimizer: torch.optim.Optimizer) -> list[Any]:
    found = optimizer.state_dict()
    found["state"] = dict(sorted(found["state"].items()))  # else in the order in which parameters were first stepped
    return [pipe.state_dict(), found, *optimizer.param_groups[0]["params"]]


def early(optimizer: HostOptimizer) -> int:
    """How many steps have begun."""
    assert isinstance(optimizer._early, EarlySteps)
    return len(optimizer._early._used)


def trained(pipe: Pipe, optimizer: HostOptimizer, way: Way, in_backward: bool) -> list[int]:
    """Trains for three steps. Returns how many steps of parameters had begun when each backward returned."""
    found = []
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(3):
        torch.manual_seed(step)
        with optimizer.step_in_backward(pipe) if in_backward else contextlib.nullcontext():
            way(pipe, step)
            found += [early(optimizer)] if in_backward else []
        if not in_backward:
            optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return found


def compare(make: Callable[[], Pipe], way: Way = backward, more: Any = lambda pipe: ()) -> list[int]:
    """Trains two pipes, the second one with early steps, whose numbers it returns."""
    found, states = [], []
    for in_backward in (False, True):
        pipe = make()
        optimizer = make_optimizer([*pipe.parameters(), *more(pipe)])
        found = trained(pipe, optimizer, way, in_backward)
        states.append(state_of(pipe, optimizer))
    assert_same(*states)
    return found


@pytest.mark.parametrize(
    ("options", "inside"),
    [
        ({}, True),
        ({"schedule": "interleaved-1f1b"}, True),
        ({"schedule": "zb-h1", "checkpoint": "never"}, True),
        ({"schedule": "zb-v", "checkpoint": "never"}, True),
        ({"schedule": "gpipe", "checkpoint": "always"}, True),
        ({"schedule": "gpipe", "checkpoint": "always"}, False),
        ({"checkpoint": "never", "offload": "activations"}, True),
        ({"debug": ("one_thread", "check_finite")}, True),
    ],
)
def test_every_schedule_gives_the_same_bits(options: dict[str, Any], inside: bool) -> None:
    pipe = make_pipe(**options)
    everything = len(list(pipe.parameters()))
    assert compare(lambda: make_pipe(**options), partial(backward, inside=inside)) == [everything] * 3


def tied() -> Pipe:
    module = layers()
    module[3].weight = module[0][0].weight
    return make_pipe(module)


def double(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad *= 2


def hooked() -> Pipe:
    pipe = make_pipe()
    pipe[1][0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    pipe[3].weight.register_post_accumulate_grad_hook(double)
    return pipe


def accumulate(pipe: Pipe, step: int) -> None:
    pipe[2][0].weight.grad = torch.ones(8, 8)
    backward(pipe, step)


def two_mini_batches(pipe: Pipe, step: int) -> None:
    (loss_of(pipe, step, inside=False) + loss_of(pipe, step + 10, inside=False)).backward()


def with_parameter_outside(pipe: Pipe, step: int) -> None:
    x, y = data(step)
    pipe(x + pipe.outside[0], target=y).backward()


def owning(parameter: nn.Parameter, pipe: Pipe) -> list[nn.Parameter]:
    vars(pipe)["outside"] = [nn.Parameter(parameter.detach().clone())]
    return vars(pipe)["outside"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "way", "at_the_end"),
    [
        (tied, backward, 1),
        (hooked, backward, 2),
        (make_pipe, accumulate, 1),
        (partial(make_pipe, schedule="gpipe"), two_mini_batches, 14),
        (lambda: make_pipe(layers(Query), schedule="zb-h1", checkpoint="never"), backward, 1),
        (lambda: make_pipe(layers(Detached, Projected), schedule="zb-h1", checkpoint="never"), backward, 1),
    ],
    ids=["tied", "hooks", "accumulated", "two mini-batches", "a parameter as output", "a detached one"],
)
def test_what_cannot_be_early_is_stepped_at_the_end(make: Callable[[], Pipe], way: Way, at_the_end: int) -> None:
    everything = len(list(make().parameters()))
    assert compare(make, way) == [everything - at_the_end] * 3


def test_parameters_outside_of_the_pipe_are_stepped_at_the_end() -> None:
    assert compare(make_pipe, with_parameter_outside, partial(owning, nn.Parameter(torch.ones(8)))) == [14] * 3


def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1e-3)


def test_with_hooks_before_the_step_all_waits() -> None:
    states = []
    for in_backward in (True, False):
        pipe = make_pipe()
        optimizer = make_optimizer(pipe.parameters())
        optimizer.register_step_pre_hook(clip)
        assert not any(trained(pipe, optimizer, backward, in_backward))
        states.append(state_of(pipe, optimizer))
    assert_same(*states)


@pytest.mark.usefixtures("captured_soon")
def test_captured_steps_wait() -> None:
    found = compare(lambda: make_pipe(graphs=True))
    assert found == [14, 0, 0]


def test_a_checkpoint_goes_on_with_the_optimizer_itself(tmp_path: Any) -> None:
    pipe, again = make_pipe(), make_pipe()
    optimizer = make_optimizer(pipe.parameters())
    trained(pipe, optimizer, backward, in_backward=True)
    save_checkpoint(tmp_path, pipe, optimizer, step=3)
    plain = torch.optim.AdamW(again.parameters(), lr=0.5, fused=True)
    load_checkpoint(tmp_path, again, plain)
    torch.manual_seed(5)
    backward(again, 5)
    plain.step()
    torch.manual_seed(5)
    with optimizer.step_in_backward(pipe):
        backward(pipe, 5)
    assert_same(state_of(pipe, optimizer), state_of(again, plain))


def regularised(pipe: Pipe, optimizer: Any) -> None:
    (loss_of(pipe) + pipe[3].weight.square().sum()).backward()


def clipped(pipe: Pipe, optimizer: Any) -> None:
    backward(pipe, 0)
    pipe.clip_grad_norm_(1e-3)


def two_backwards(pipe: Pipe) -> None:
    backward(pipe, 0)
    backward(pipe, 1)


def dropped(pipe: Pipe, optimizer: Any) -> None:
    backward(pipe, 0)
    optimizer.zero_grad()


def twice(pipe: Pipe, optimizer: Any) -> None:
    loss = loss_of(pipe)
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize(
    "way",
    [
        regularised,
        clipped,
        dropped,
        twice,
        lambda pipe, optimizer: (loss_of(pipe) / 4).backward(),
        lambda pipe, optimizer: loss_of(pipe),
        lambda pipe, optimizer: torch.autograd.grad(loss_of(pipe), list(pipe.parameters())),
    ],
    ids=["regularised", "clipped", "dropped", "twice", "factor", "no backward", "grad"],
)
def test_other_gradients_than_those_that_were_used_are_an_error(way: Callable[[Pipe, Any], object]) -> None:
    pipe = make_pipe()
    optimizer = make_optimizer(pipe.parameters())
    with (
        pytest.raises(
            RuntimeError, match=r"parameters were stepped in the backward, .* and then got another .grad"
        ) as error,
        optimizer.step_in_backward(pipe),
    ):
        way(pipe, optimizer)
    assert "14 parameters have been stepped in this backward already" in error.value.__notes__[0]
    assert "load the last checkpoint" in error.value.__notes__[0]
    with optimizer.step_in_backward(pipe):  # the next context begins anew
        optimizer.zero_grad()
        backward(pipe, 1)


def test_wrong_uses_are_refused(tmp_path: Any) -> None:
    pipe = make_pipe()
    optimizer = make_optimizer(pipe.parameters())
    with pytest.raises(TypeError, match="got Sequential, and wanted a Pipe"), optimizer.step_in_backward(layers()):
        pass
    scaled = make_pipe(grad_scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="the pipe has a grad_scaler"), optimizer.step_in_backward(scaled):
        pass
    strange = make_optimizer(layers().parameters())
    with pytest.raises(ValueError, match="has no parameter of this pipe"), strange.step_in_backward(pipe):
        pass
    with strange.step_in_backward(Pipe(nn.Sequential(nn.ReLU()), devices=["cpu"])):  # as on a rank without parameters
        pass
    other = make_optimizer(pipe.parameters())
    for again in (optimizer, other):
        with (
            optimizer.step_in_backward(pipe),
            pytest.raises(RuntimeError, match="one in another"),
            again.step_in_backward(pipe),
        ):
            pass
    state, weights = optimizer.state_dict(), pipe.state_dict()
    for use in (
        pipe.state_dict,
        lambda: pipe.load_state_dict(weights),
        lambda: save_checkpoint(tmp_path, pipe, step=1),
    ):
        with pytest.raises(RuntimeError, match="within step_in_backward"), optimizer.step_in_backward(pipe):
            use()
    for name, arguments in (("step", ()), ("state_dict", ()), ("load_state_dict", (state,))):
        words = rf"optimizer\.{name}\(\) was called within"
        with pytest.raises(RuntimeError, match=words), optimizer.step_in_backward(pipe):
            getattr(optimizer, name)(*arguments)
    with (
        pytest.raises(RuntimeError, match=r"called again .* give each mini-batch") as error,
        optimizer.step_in_backward(pipe),
    ):
        two_backwards(pipe)
    assert "have been stepped" in error.value.__notes__[0]
    pipe.zero_grad()
    with pytest.raises(RuntimeError, match="the learning rate was changed inside"), optimizer.step_in_backward(pipe):
        optimizer.param_groups[0]["lr"] *= 0.1


def test_gradients_are_not_stepped_again_after_the_context() -> None:
    pipe = make_pipe()
    optimizer = make_optimizer(pipe.parameters())
    with optimizer.step_in_backward(pipe):
        backward(pipe, 0)
    with pytest.raises(RuntimeError, match=r"leave step\(\) out after the block"):
        optimizer.step()
    kept = [each.grad for each in pipe.parameters()]
    pipe.zero_grad()
    backward(pipe, 1)
    optimizer.step()
    assert len(kept) == len([*pipe.parameters()])
    assert {int(each["step"]) for each in optimizer.state.values()} == {2}


def test_a_backward_outside_of_the_context_steps_nothing() -> None:
    pipe = make_pipe(schedule="gpipe")
    optimizer = make_optimizer(pipe.parameters())
    before = copy.deepcopy(pipe.state_dict())
    with optimizer.step_in_backward(pipe):
        loss = loss_of(pipe, inside=False)
    loss.backward()
    for name, parameter in pipe.named_parameters():
        assert torch.equal(parameter, before[name])


@pytest.mark.parametrize("last", [False, True])
def test_a_failed_backward_says_whether_parameters_were_stepped(last: bool) -> None:
    fails = Fails()
    # Stage 1 is complete when stage 0 fails in the last micro-batch.
    pipe = make_pipe(nn.Sequential(nn.Linear(8, 8), fails, nn.Linear(8, 8)), balance=[2, 1], devices=["cpu"] * 2)
    optimizer = make_optimizer(pipe.parameters())
    before = copy.deepcopy(pipe.state_dict())
    fails.left = 4 if last else 1
    with pytest.raises(ArithmeticError, match="on purpose") as error, optimizer.step_in_backward(pipe):
        backward(pipe, 0)
    stepped = [name for name, value in pipe.state_dict().items() if not torch.equal(value, before[name])]
    notes = [note for note in error.value.__notes__ if "have been stepped" in note]
    assert bool(stepped) == bool(notes)
    assert last or not notes


def test_a_failure_of_a_step_is_raised_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any) -> None:
        raise MemoryError("on purpose")

    pipe = make_pipe()
    optimizer = make_optimizer(pipe.parameters())
    monkeypatch.setattr(HostLink, "give_back", no_memory)
    with pytest.raises(MemoryError, match="on purpose") as error, optimizer.step_in_backward(pipe):
        backward(pipe, 0)
    assert "no_memory" in [entry.name for entry in error.traceback]
    assert "have been stepped" in error.value.__notes__[0]


def test_intra_op_threads_are_those_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    begin = early_steps._begin_thread

    def begun(threads: int) -> None:
        begin(threads)
        seen.append(torch.get_num_threads())

    monkeypatch.setattr(early_steps, "_begin_thread", begun)
    torch.set_num_threads(3)
    try:
        pipe = make_pipe()
        with make_optimizer(pipe.parameters()).step_in_backward(pipe):
            backward(pipe, 0)
        assert (seen, torch.get_num_threads()) == ([3], 3)
    finally:
        torch.set_num_threads(1)


def test_a_loss_that_is_kept_keeps_no_gradients() -> None:
    pipe = make_pipe()
    optimizer = make_optimizer(pipe.parameters())
    with optimizer.step_in_backward(pipe):
        loss = loss_of(pipe)
        loss.backward()
        used = optimizer._early._used
    gradients = [weakref.ref(gradient) for _, gradient, _ in used]
    del used
    optimizer.zero_grad()
    assert loss.isfinite()
    assert len(gradients) == 14
    assert not any(gradient() is not None for gradient in gradients)


def test_a_failure_of_a_step_at_the_end_says_that_parameters_were_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = make_pipe()
    outside = nn.Parameter(torch.ones(3))
    outside.grad = torch.ones(3)
    optimizer = make_optimizer([*pipe.parameters(), outside])
    give_back = HostLink.give_back

    def no_memory(link: HostLink, on_host: Tensor, parameter: Tensor) -> None:
        if parameter is outside:
            raise MemoryError("on purpose")
        give_back(link, on_host, parameter)

    monkeypatch.setattr(HostLink, "give_back", no_memory)
    with pytest.raises(MemoryError, match="on purpose") as error, optimizer.step_in_backward(pipe):
        backward(pipe, 0)
    assert "15 parameters have been stepped" in error.value.__notes__[0]
