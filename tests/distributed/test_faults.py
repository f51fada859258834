"""Injected faults."""

import signal
import threading
import time

import pytest

import pipework
from pipework.distributed.faults import KINDS, Fault, Faults, InjectedFault, fail_at, faults_from_environment
from tests.programs import RunPython


def test_what_is_left_open_matches_everything() -> None:
    assert fail_at().matches(rank=3, step=2, action="F", stage=1, micro_batch=0)
    assert fail_at(action="optimizer").matches(rank=3, step=2, action="optimizer")
    fault = fail_at(rank=1, step=2, action="B", stage=3, micro_batch=4)
    place = {"rank": 1, "step": 2, "action": "B", "stage": 3, "micro_batch": 4}
    assert fault.matches(**place)  # type: ignore[arg-type]
    for name in place:
        assert not fault.matches(**{**place, name: "F" if name == "action" else 0})  # type: ignore[arg-type]
    assert not fault.matches(rank=1)


def test_only_in_one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault.parse("rank=0,kind=kill,attempt=0")
    assert fault.matches(rank=0)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not fault.matches(rank=0)
    assert fail_at(attempt=1).matches(rank=0)
    assert fail_at().matches(rank=0)


@pytest.mark.parametrize(
    "fault",
    [
        fail_at(),
        fail_at(rank=1, step=3, action="SEND_F", kind="kill"),
        fail_at(stage=0, micro_batch=2, kind="sleep", seconds=0.5, attempt=2),
    ],
)
def test_text_and_back(fault: Fault) -> None:
    assert Fault.parse(str(fault)) == fault


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' of the fault '' is not known: a fault has rank, step, action"),
        ("kind", "'kind' of the fault 'kind' is not known"),
        ("rnak=1,kind=kill", "'rnak=1' of the fault .* is not known: a fault has rank, step, action"),
        ("rank=one,kind=kill", "rank of the fault .* must be a number, got 'one'"),
        ("rank=1", "has no kind: add kind= and one of raise, exit, kill"),
        ("rank=1,rank=2,kind=kill", "has two values of rank"),
        ("rank=-1,kind=kill", "rank of a fault must be an integer from 0, or None for any: got -1"),
        ("kind=explode", "kind='explode' of a fault is not known: wanted one of raise, exit, kill"),
        ("kind=kill,action=forward", "action='forward' of a fault is not known: wanted one of F, B, I, W, R, SEND_F"),
        ("kind=sleep,seconds=0", "seconds of a fault must be a positive number, got 0.0"),
        ("kind=sleep,seconds=nan", "seconds of a fault must be a positive number, got nan"),
    ],
)
def test_typing_errors_are_explained(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Fault.parse(text)


def test_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPEWORK_FAULT", raising=False)
    assert faults_from_environment() == ()
    monkeypatch.setenv("PIPEWORK_FAULT", " rank=1, step=3, action=B, kind=kill ;rank=0,kind=stop; ")
    assert faults_from_environment() == (
        fail_at(rank=1, step=3, action="B", kind="kill"),
        fail_at(rank=0, kind="stop"),
    )


def test_a_typing_error_in_the_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPEWORK_FAULT", "rank=1,kind=kill;rank=1,knid=kill")
    with pytest.raises(ValueError, match=r"'knid=kill' of the fault .* is not known: a fault has rank, step") as caught:
        faults_from_environment()
    begin = "the environment variable PIPEWORK_FAULT is 'rank=1,kind=kill;rank=1,knid=kill', which is no fault: "
    assert str(caught.value).startswith(begin)


def test_a_fault_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    faults = Faults([fail_at(rank=1, action="B", kind="sleep", seconds=0.01), fail_at(rank=0)], rank=1)
    faults.strike("F", 1, 2)
    assert not caplog.records
    faults.step = 3
    faults.strike("B", 1, 2)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("pipework", "WARNING")
    assert record.getMessage() == (
        "an injected fault strikes at rank 1, step 3, action B, stage 1, micro-batch 2: sleep "
        "(PIPEWORK_FAULT=rank=1,action=B,kind=sleep,seconds=0.01)"
    )


def test_raising() -> None:
    with pytest.raises(InjectedFault, match="injected on purpose: rank=1,kind=raise"):
        fail_at(rank=1).strike()
    with pytest.raises(SystemExit) as caught:
        fail_at(kind="exit").strike()
    assert caught.value.code == 1


@pytest.mark.parametrize(("kind", "others_run"), [("sleep", True), ("hang", True), ("hold_gil", False)])
@pytest.mark.thorough
def test_taking_time(kind: str, others_run: bool) -> None:
    times: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            times.append(time.monotonic())
            time.sleep(0.01)

    thread = threading.Thread(target=tick)
    thread.start()
    begun = time.monotonic()
    fail_at(kind=kind, seconds=1).strike()
    ended = time.monotonic()
    done.set()
    thread.join()
    assert ended - begun > 0.9
    between = [each for each in times if begun + 0.1 < each < ended - 0.1]
    assert bool(between) == others_run


@pytest.mark.parametrize(("kind", "number"), [("kill", signal.SIGKILL), ("terminate", signal.SIGTERM)])
@pytest.mark.thorough
def test_signals(run_python: RunPython, kind: str, number: int) -> None:
    code = f"from pipework.distributed.faults import fail_at; fail_at(kind={kind!r}).strike()"
    assert run_python(["-c", code]).returncode == -number


@pytest.mark.thorough
def test_stopping_for_a_while(run_python: RunPython) -> None:
    code = "from pipework.distributed.faults import fail_at; fail_at(kind='stop', seconds=0.5).strike(); print('woken')"
    done = run_python(["-c", code])
    assert done.stdout == "woken\n"


def test_every_kind_is_explained() -> None:
    assert fail_at.__doc__ is not None
    assert all(f'``"{kind}"``' in fail_at.__doc__ for kind in KINDS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank=9,kind=kill", "rank=9,kind=kill never strikes, as the ranks are 0, 1"),
        ("stage=7,kind=kill", "stage=7,kind=kill never strikes, as the stages are 0 to 3"),
    ],
)
def test_a_fault_that_can_never_strike_is_refused(monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    monkeypatch.setenv("PIPEWORK_FAULT", text)
    with pytest.raises(ValueError, match=f"PIPEWORK_FAULT: {message}"):
        Faults.of_environment(0, [0, 1], 4)


def test_a_single_process_has_no_faults(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("PIPEWORK_FAULT", "rank=0,kind=raise")
    assert pipework.init() is None
    assert "PIPEWORK_FAULT has no effect in a single process" in caplog.text
    monkeypatch.setenv("PIPEWORK_FAULT", "kaboom")
    with pytest.raises(ValueError, match="PIPEWORK_FAULT is 'kaboom', which is no fault"):
        pipework.init()
