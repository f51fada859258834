"""`Pipe(schedule="auto")`: the first training mini-batch makes the plan."""

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipework import MicroBatches, Pipe, Plan, load_checkpoint, save_checkpoint
from pipework.assignment.partition import split_layers

FEW = {"iterations": 8, "timeout": 0}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))


def auto(module: nn.Sequential, **options: Any) -> Pipe:
    return Pipe(
        module, **({"schedule": "auto", "loss_fn": F.mse_loss, "devices": ["cpu", "cpu"], "plan": FEW} | options)
    )


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(16, 8), torch.randn(16, 8)


def test_the_first_step_is_planned_and_later_ones_are_like_it() -> None:
    pipe, (x, y) = auto(model()), batch()
    assert pipe.plan is None
    parameters = list(pipe.parameters())
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        pipe(x, target=y).backward()
        optimizer.step()
    assert isinstance(pipe.plan, Plan)
    assert (pipe.chunks, pipe.balance) == (pipe.plan.chunks, list(pipe.plan.balance))
    assert all(now is before for now, before in zip(pipe.parameters(), parameters, strict=True))
    told = Pipe(model(), plan=pipe.plan, loss_fn=F.mse_loss)
    optimizer = torch.optim.SGD(told.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        told(x, target=y).backward()
        optimizer.step()
    torch.testing.assert_close(list(pipe.parameters()), list(told.parameters()), rtol=0, atol=0)


def test_chunks_that_are_given_stay() -> None:
    pipe, (x, y) = auto(model(), chunks=4), batch()
    pipe(x, target=y)
    assert pipe.chunks == 4


def test_memory_is_a_limit_of_the_plan() -> None:
    pipe, (x, y) = auto(model(), memory="1 MiB"), batch()
    pipe(x, target=y)
    assert pipe.plan is not None
    assert {worker.limit for worker in pipe.plan.workers} == {2.0**19}  # two workers share the CPU's
    with pytest.raises(ValueError, match="largest limit is 50 B"):
        auto(model(), memory=100)(x, target=y)


def test_hooks_replaced_layers_and_modes_survive_the_plan() -> None:
    pipe, (x, y) = auto(model()), batch()
    called: list[str] = []
    pipe.register_forward_hook(lambda *_: called.append("pipe"))
    pipe[1] = nn.Linear(8, 8, bias=False)
    pipe[2].eval()
    new = pipe[1]
    pipe(x, target=y)
    assert called == ["pipe"]
    assert pipe[1] is new
    assert pipe.training
    assert not pipe[2].training


def test_copies_pickles_and_checkpoints_before_the_plan(tmp_path: Any) -> None:
    pipe, (x, y) = auto(model()), batch()
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    others = [copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))]
    save_checkpoint(tmp_path / "saved", pipe, optimizer, step=0)
    with torch.no_grad():
        pipe[0].weight.zero_()
    load_checkpoint(tmp_path / "saved", pipe, optimizer)
    for each in (pipe, *others):
        each(x, target=y).backward()
        assert each.plan is not None
    torch.testing.assert_close(list(pipe.parameters()), list(others[0].parameters()), rtol=0, atol=0)


def test_a_failure_after_the_plan_leaves_a_pipe_without_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, (x, y) = auto(model()), batch()

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("pipework.pipe.split_layers", full)
        with pytest.raises(torch.OutOfMemoryError):
            pipe(x, target=y)
    with pytest.raises(RuntimeError, match="no plan yet"):
        pipe.eval()(x)
    pipe.train()(x, target=y).backward()
    assert pipe.plan is not None


def test_a_thread_that_calls_while_another_one_plans_waits_for_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, (x, y), losses = auto(model()), batch(), []
    second = threading.Thread(target=lambda: losses.append(pipe(x, target=y)), daemon=True)

    def split(*arguments: Any) -> Any:
        second.start()
        second.join(0.2)
        return split_layers(*arguments)

    monkeypatch.setattr("pipework.pipe.split_layers", split)
    losses.append(pipe(x, target=y))
    second.join(20)
    assert len(losses) == 2
    assert torch.equal(*losses)


NO_PLAN = {
    "chunks": lambda pipe: pipe.chunks,
    "balance": lambda pipe: pipe.balance,
    "schedule": lambda pipe: pipe.schedule(),
    "predict": lambda pipe: pipe.predict(batch()[0]),
    "record": lambda pipe: pipe.record().__enter__(),
    "an evaluation": lambda pipe: pipe.eval()(batch()[0]),
    "no gradients": lambda pipe: torch.no_grad()(pipe)(batch()[0], target=batch()[1]),
}


@pytest.mark.parametrize("what", NO_PLAN)
def test_what_needs_a_plan_says_that_there_is_none_yet(what: str) -> None:
    pipe = auto(model())
    with pytest.raises(RuntimeError, match="no plan yet: schedule='auto'"):
        NO_PLAN[what](pipe)
    assert "auto" in repr(pipe)
    pipe.train()(batch()[0], target=batch()[1])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "balance": ({"balance": [2, 3]}, "balance= is given beside schedule='auto'"),
    "checkpoint": ({"checkpoint": "never"}, "checkpoint= is given beside schedule='auto'"),
    "an unknown option": ({"plan": {"second": 3}}, "plan has 'second'"),
    "memory alone": ({"schedule": "gpipe", "plan": None, "memory": 3}, "memory= is for schedule='auto'"),
    "options alone": ({"schedule": "gpipe"}, "wanted a Plan"),
    "no mapping": ({"plan": 3}, "wanted options of pipework.plan in a dict"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_are_refused_at_once(wrong: str) -> None:
    options, message = WRONG[wrong]
    with pytest.raises((TypeError, ValueError), match=message):
        auto(model(), **options)


def test_models_that_cannot_be_measured_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="meta device"), torch.device("meta"):
        auto(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    with pytest.raises(TypeError, match=r"must be nn\.Sequential"):
        auto(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_a_step_without_a_target_or_of_split_tensors_is_refused() -> None:
    pipe, (x, y) = auto(model()), batch()
    with pytest.raises(ValueError, match="pipe\\(x, target=y\\)"):
        pipe(x)
    with pytest.raises(ValueError, match="split already"):
        pipe(MicroBatches([x, x]), target=MicroBatches([y, y]))
