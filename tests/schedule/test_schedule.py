import dataclasses
import pickle
import subprocess
import sys

import pytest

from pipework.schedule import Action, Schedule, fill_drain

F, B = Action("F", 0, 0), Action("B", 0, 0)


def test_properties():
    wave = Schedule(
        "wave",
        placement=(0, 1, 1, 0),
        orders=[[Action("F", 0, 0), Action("F", 3, 4)], [Action("F", 1, 0), Action("F", 2, 0)]],
    )
    assert (wave.workers, wave.stages, wave.micro_batches) == (2, 4, 5)
    assert wave.stages_of(0) == (0, 3)
    assert wave.stages_of(1) == (1, 2)
    with pytest.raises(ValueError, match="worker is 2, but this schedule has the workers 0 to 1"):
        wave.stages_of(2)


def test_is_an_immutable_value():
    one, other = fill_drain(2, 3), fill_drain(2, 3)
    assert one == other
    assert len({one, other, fill_drain(2, 2)}) == 2
    assert one.micro_batches == 3  # cached; must neither break equality nor pickling
    assert pickle.loads(pickle.dumps(one)) == other
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.name = "other"


def test_lists_become_tuples():
    assert hash(Schedule("s", [0], [[F, B]])) == hash(Schedule("s", (0,), ((F, B),)))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3, (0,), ((F, B),)), TypeError, "name of a schedule is 3"),
        (("s", (), ((F, B),)), ValueError, "placement is empty"),
        (("s", (0,), ()), ValueError, "orders is empty"),
        (("s", (0,), ((),)), ValueError, "no action at all"),
        (("s", ("0",), ((F, B),)), TypeError, "placement of stage 0 is '0'"),
        (("s", (True,), ((F, B),)), TypeError, "placement of stage 0 is True"),
        (("s", (1,), ((F, B),)), ValueError, "stage 0 is placed on worker 1"),
        (("s", (-1,), ((F, B),)), ValueError, "stage 0 is placed on worker -1"),
        (("s", (0,), ((F, B), ())), ValueError, "worker 1 holds no stage"),
        (("s", (0,), ((("F", 0, 0), B),)), TypeError, "position 0 of worker 0's order"),
        (("s", (0,), ((F, Action("X", 0, 0)),)), ValueError, "kind must be one of F, B, I, W, R"),
        (
            ("s", (0,), ((F, Action("B", 1, 0)),)),
            ValueError,
            "1B0 in worker 0's order: placement has the stages 0 to 0",
        ),
        (("s", (0,), ((F, Action("B", 0, -1)),)), ValueError, "micro-batches are counted from 0"),
        (("s", (0,), ((F, Action("B", 0, 1.0)),)), TypeError, "got int, float, int"),
    ],
)
def test_constructor_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        Schedule(*arguments)


def test_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"  # any import of torch raises
        "import pipework.schedule, pipework.timeline\n"
        "from pipework.schedule import *; svg(simulate(fill_drain(2, 2)).timeline)\n"
        "foreign = {name.split('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)\n"
        "print(sorted(name for name in foreign if name in ('numpy', 'hypothesis', 'matplotlib')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


def test_it_is_shown_in_a_line():
    assert repr(fill_drain(2, 8)) == "Schedule('gpipe', 2 workers, 8 micro-batches)"


def test_kinds():
    assert Schedule("tiny", (0,), ((F, B),)).kinds == {"F", "B"}
    assert fill_drain(2, 3).kinds == {"F", "B"}
    assert not fill_drain(2, 3).communicates


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (("F", 0, 4999), TypeError, "position 4999 of worker 0's order is"),
        (Action("F", 0, True), TypeError, "wanted an int for stage, micro_batch and peer, got int, bool, int"),
        (Action("F", [0], 1), TypeError, "wanted an int for stage, micro_batch and peer, got list, int, int"),
        (Action("G", 0, 1), ValueError, "kind must be one of F, B"),
        (Action("F", 1, 1), ValueError, "placement has the stages 0 to 0"),
        (Action("F", -1, 1), ValueError, "placement has the stages 0 to 0"),
        (Action("F", 0, -1), ValueError, "micro-batches are counted from 0"),
        (Action("F", 0, 1, 0), ValueError, "it has no peer"),
        (Action("SEND_F", 0, 1), ValueError, "wanted a peer"),
    ],
)
def test_a_fault_is_found_at_the_end_of_a_long_order(wrong, error, message):
    order = [Action("F", 0, number) for number in range(4999)]
    with pytest.raises(error, match=message):
        Schedule("long", (0,), ([*order, wrong],))
    assert Schedule("long", (0,), (order,)).micro_batches == 4999
