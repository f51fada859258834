"""The loop over actions, and one thread that executes the actions of all workers."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pipework import Pipe
from pipework.runtime.failure import Failure, Stopped
from pipework.runtime.worker import ThreadRun, run_actions
from pipework.schedule import Action

ORDER = [Action("F", 0, 0), Action("F", 1, 0), Action("B", 1, 0), Action("B", 0, 0)]


def test_actions_are_executed_in_order_by_the_handler_of_their_kind_and_stage() -> None:
    done: list[tuple[str, Action]] = []
    handlers = {
        (kind, stage): lambda action, name=f"{kind}{stage}": done.append((name, action))
        for kind in "FB"
        for stage in (0, 1)
    }
    finished: list[Action] = []
    failure = Failure(lambda: None)
    run_actions(ORDER, handlers, failure, finished.append)
    assert done == [("F0", ORDER[0]), ("F1", ORDER[1]), ("B1", ORDER[2]), ("B0", ORDER[3])]
    assert finished == ORDER
    assert not failure.happened


def handlers_that_raise(error: BaseException, at: Action) -> dict[tuple[str, int], object]:
    def handle(action: Action) -> None:
        if action == at:
            raise error

    return {(kind, stage): handle for kind in "FB" for stage in (0, 1)}


def test_an_exception_is_kept_with_the_name_of_its_action_and_others_are_woken() -> None:
    stopped: list[bool] = []
    failure = Failure(lambda: stopped.append(True))
    error = ValueError("odd")
    run_actions(ORDER, handlers_that_raise(error, ORDER[2]), failure)
    assert stopped == [True]
    with pytest.raises(ValueError, match="odd") as caught:
        failure.raise_first()
    assert caught.value is error
    assert error.__notes__ == ["pipework: stage 1, micro-batch 0, action B"]


def test_a_worker_does_nothing_more_after_another_has_failed() -> None:
    failure = Failure(lambda: None)
    failure.report(ValueError(), None)
    run_actions(ORDER, {}, failure)  # an empty table of handlers would raise


def test_being_stopped_is_no_failure() -> None:
    failure = Failure(lambda: None)
    run_actions(ORDER, handlers_that_raise(Stopped(), ORDER[0]), failure)
    assert not failure.happened


def test_a_thread_enters_its_device_before_parameters_are_gathered_on_it() -> None:
    done: list[str] = []
    sharded = SimpleNamespace(is_whole=False, gather=lambda: done.append("gather"))
    device = SimpleNamespace(enter_thread=lambda: done.append("enter"), stream=None)
    aliases = SimpleNamespace(
        sharded=sharded, gather=sharded.gather, reshard=lambda: done.append("reshard"), _slots=[], _stray=None
    )
    worker = SimpleNamespace(
        device=device,
        stream=None,
        handlers={("F", 0): lambda action: done.append("F")},
        runs={0: SimpleNamespace(aliases=aliases)},
        is_recorded=False,
        start_clock=lambda: done.append("clock"),
        gathered_later=list,
        finish=lambda: done.append("finish"),
    )
    failure = Failure(lambda: None)
    ThreadRun([worker], [Action("F", 0, 0)], failure)()  # type: ignore[list-item]
    assert not failure.happened
    assert done == ["enter", "clock", "gather", "F", "finish", "reshard"]


# One thread


SCHEDULES = ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v"]


def model(layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3)) for _ in range(layers)))


class Threads(nn.Module):
    """Notes on which threads it runs, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.intra_op: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(threading.current_thread().name)
        self.intra_op.add(torch.get_num_threads())
        x.register_hook(lambda _: self.seen.add(threading.current_thread().name))
        return x * 1


@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_are_those_of_a_thread_each(schedule: str, checkpoint: str) -> None:
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    found = []
    for debug in ((), "one_thread"):
        pipe = Pipe(
            model(), 4, checkpoint, schedule=schedule, loss_fn=nn.functional.mse_loss, devices=["cpu"] * 2,
            debug=debug,
        )  # fmt: skip
        torch.manual_seed(7)
        loss = pipe(x, target=y)
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in pipe.parameters())])
    assert all(map(torch.equal, *found))


def test_all_layers_run_on_one_thread_with_all_cores() -> None:
    layers = [Threads() for _ in range(3)]
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), *layers), 2, balance=[2, 1, 1], devices=["cpu"] * 3, debug="one_thread")
    pipe(torch.ones(4, 2)).sum().backward()
    assert set.union(*(layer.seen for layer in layers)) == {"pipework worker 0"}
    assert set.union(*(layer.intra_op for layer in layers)) == {torch.get_num_threads()}


def test_an_error_names_its_place_and_the_pipe_goes_on() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 100:
                raise ValueError("too large")
            return x

    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), Fails()), 2, balance=[1, 1], devices=["cpu"] * 2, debug="one_thread")
    with pytest.raises(ValueError, match="too large") as caught:
        pipe(torch.full((4, 2), 1e4) * pipe[0].weight.sign().sum(0))
    assert any("stage 1, micro-batch 0, action F" in note for note in caught.value.__notes__)
    pipe(torch.zeros(4, 2)).sum().backward()


def test_modes_see_every_operator_and_actions_are_recorded() -> None:
    pipe = Pipe(model(), 4, schedule="1f1b", loss_fn=nn.functional.mse_loss, devices=["cpu"] * 2, debug="one_thread")
    x = torch.randn(8, 6)
    pipe(x, target=x).backward()
    with FlopCounterMode(display=False) as counter, pipe.record() as timeline:
        pipe(x, target=x).backward()
    assert counter.get_total_flops() > 0
    assert {(each.worker, each.action.kind) for each in timeline.timeline().intervals} >= {
        (worker, kind) for worker in (0, 1) for kind in "FB"
    }
