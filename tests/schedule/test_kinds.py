"""A new kind is a row of the table, and a handler in the runtime; nothing else is told of it."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipework
from pipework.runtime.stage import stage_run
from pipework.schedule import (
    KINDS,
    Action,
    ActionKind,
    Costs,
    Kinds,
    build,
    from_csv,
    from_json,
    grid,
    lower_bound,
    simulate,
    svg,
    to_csv,
    to_json,
    validate,
    with_communication,
)
from pipework.timeline import trace

# After F, the activations of a micro-batch are compressed (P); before its backward they are made again (U).
COMPRESSING = Kinds(
    *KINDS.values(),
    ActionKind(
        "P", "compress", phase="forward", needs=("F",), gives="P", partner="U", cost="unshard",
        holds="checkpoint_activation", color="#d9a5b3",
    ),
    ActionKind(
        "U", "expand", needs=("P",), gives="U", before=("B", "I"), partner="P", cost="unshard", holds="activation",
        color="#e8c07d",
    ),
)  # fmt: skip
TEXT = "0F0,0P0,0F1,0P1,0F2,0P2,0U0,0B0,0U1,0B1,0U2,0B2\n1F0,1B0,1F1,1B1,1F2,1B2"
SCHEDULE = from_csv(TEXT, name="compressing", table=COMPRESSING)
COSTS = Costs(1, 2, unshard=0.5, checkpoint_activation=0.25)


def test_text_and_files():
    action = Action.parse("2P13", COMPRESSING)
    assert (action, str(action)) == (Action("P", 2, 13), "2P13")
    with pytest.raises(ValueError, match=r"wanted stage, kind \(F, B, I, W, R\) and micro-batch"):
        Action.parse("2P13")
    assert to_csv(SCHEDULE).strip() == TEXT
    assert from_json(to_json(SCHEDULE), table=COMPRESSING) == SCHEDULE
    wrong, *_ = validate(from_csv(TEXT.replace("0U1,0B1", "0B1,0U1"), table=COMPRESSING)).violations
    assert wrong.message == "worker 0 waits forever at 0B1: it needs 0U1, which is later in its own order"


def test_a_table_that_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="the kind 'U' needs 'P', which no kind of the table gives"):
        Kinds(*KINDS.values(), COMPRESSING["U"])
    with pytest.raises(ValueError, match="the kinds 'recompute' and 'compress' both have the letter 'R': give each"):
        Kinds(*KINDS.values(), COMPRESSING["P"]._replace(letter="R"))


def test_times_and_memory():
    result = simulate(SCHEDULE, COSTS, memory_limit=1.5)
    row = result.timeline.by_worker[0]
    assert {str(each.action): (each.start, each.end, each.memory, each.held) for each in row} == {
        "0F0": (0, 1, 1, 1), "0P0": (1, 1.5, 1, 0.25), "0F1": (1.5, 2.5, 1.25, 1), "0P1": (2.5, 3, 1.25, 0.25),
        "0F2": (3, 4, 1.5, 1), "0P2": (4, 4.5, 1.5, 0.25), "0U0": (4.5, 5, 1.5, 1), "0B0": (5, 7, 1.5, 0),
        "0U1": (7, 7.5, 1.25, 1), "0B1": (7.5, 9.5, 1.25, 0), "0U2": (9.5, 10, 1, 1), "0B2": (10, 12, 1, 0),
    }  # fmt: skip
    assert max(simulate(build("gpipe", workers=2, chunks=3), COSTS).peak_memory) == 3
    # The bounds know no kind that frees memory before the backward, so they take no limit from this schedule.
    assert lower_bound((0, 1), 3, COSTS, memory_limit=1.5) > result.makespan == result.lower_bound == 12
    assert (
        " ".join(str(each.action) for each in result.critical_path) == "0F0 0P0 0F1 0P1 0F2 0P2 0U0 0B0 0U1 0B1 0U2 0B2"
    )
    assert simulate(with_communication(SCHEDULE, COSTS), COSTS, channel="pair").makespan == 12


def test_pictures_and_traces():
    line = simulate(SCHEDULE, COSTS).timeline
    assert "0P0" in grid(line)
    assert "0U1" in grid(line)
    picture = svg(line)
    assert all(part in picture for part in ("#d9a5b3", "#e8c07d", ">compress<", ">expand<"))
    events = trace(line)["traceEvents"]
    assert {event["cat"] for event in events if event["name"] in ("0P0", "0U0")} == {"compress", "expand"}


def test_a_pipe_runs_its_handler(monkeypatch):
    calls = Counter()

    def count(stage, action):
        calls[str(action)] += 1

    monkeypatch.setattr(stage_run, "HANDLERS", {**stage_run.HANDLERS, "P": (count,), "U": (count,)})
    torch.manual_seed(0)
    plain, layers = (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)) for _ in range(2))
    layers.load_state_dict(plain.state_dict())
    x, y = torch.randn(6, 3), torch.randn(6, 2)
    pipe = pipework.Pipe(layers, 3, "never", balance=[1, 1], devices=["cpu"] * 2, schedule=SCHEDULE, loss_fn=mse_loss)
    with pipe.record() as recording:
        pipe(x, target=y).backward()
    for part, target in zip(x.chunk(3), y.chunk(3), strict=True):
        (mse_loss(plain(part), target) / 3).backward()
    for ours, theirs in zip(layers.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert calls == Counter(str(action) for action in SCHEDULE.orders[0] if action.kind in "PU")
    with torch.no_grad():
        torch.testing.assert_close(pipe(x), plain(x))
    # What was recorded has its times, and is predicted, drawn and saved with them.
    assert recording.costs().unshard[0] > 0
    assert recording.predicted().makespan > 0
    assert ">compress<" in svg(recording.timeline())
    assert ">expand<" in svg(pipe.predict(x, target=y, timeout=0).simulation.timeline)


def test_a_pipe_follows_the_table_of_its_schedule():
    few = Kinds(KINDS["F"], KINDS["B"])
    schedule = from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1", table=few)
    pipe = pipework.Pipe(
        nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), 2, "never", balance=[1, 1], devices=["cpu"] * 2,
        schedule=schedule, loss_fn=mse_loss, debug="check_finite",
    )  # fmt: skip
    with torch.autocast("cpu", torch.bfloat16), pipe.record() as recording:
        pipe(torch.randn(4, 3), target=torch.randn(4, 2)).backward()
    assert pipe[0].weight.grad is not None
    assert sum(len(row) for row in recording.timeline().by_worker) == 8
