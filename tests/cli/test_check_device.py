import io
from typing import Any

import pytest
import torch

from pipework.cli import check_device, main
from pipework.device_check import check
from pipework.runtime.device import Link


def run(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    status = main(["check-device", *arguments])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


@pytest.fixture
def first_case_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "FIRST", 1)


def test_the_cpu(capsys: Any) -> None:
    threads = torch.get_num_threads()
    status, out, errors = run(capsys, "--devices", "cpu", "--seconds", "0")
    assert (status, errors) == (0, "")  # quiet, since the standard error is no terminal
    assert "only the CPU: this says nothing about GPUs" in out
    assert "All right: 6 cases" in out
    assert torch.get_num_threads() == threads


@pytest.mark.usefixtures("first_case_only")
def test_a_wrong_bit_turns_the_verdict_and_asks_for_a_report(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    train = check.train_pipe

    def off(*arguments: Any) -> Any:
        values = train(*arguments)
        values["step 2: loss"] = torch.nextafter(values["step 2: loss"], torch.tensor(torch.inf))
        return values

    monkeypatch.setattr(check, "train_pipe", off)
    status, out, _ = run(capsys, "--devices", "cpu", "--seconds", "0")
    assert status == 1
    assert "cpu             WRONG" in out
    assert "(seed 0): step 2: loss: the largest difference is " in out
    assert "WRONG on cpu: 1 case" in out
    assert torch.__version__ in out.partition("Report all of this output:")[2]


@pytest.mark.usefixtures("first_case_only")
def test_the_plain_model_that_differs_from_itself_is_told_of(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    train, factors = check.train_plain, iter([1.0, 1.00001, 1.0, 2.0])

    def inexact(*arguments: Any) -> Any:
        factor = next(factors)
        return {name: value * factor for name, value in train(*arguments).items()}

    monkeypatch.setattr(check, "train_plain", inexact)
    status, out, _ = run(capsys, "--devices", "cpu", "--seconds", "0")
    assert status == 0
    assert "in 1 case the plain model differed from itself" in out
    status, out, _ = run(capsys, "--devices", "cpu", "--seconds", "0")
    assert status == 1
    assert "the plain model, without pipework, differs from itself: step 0" in out


@pytest.mark.usefixtures("first_case_only")
def test_an_error_does_not_end_the_check(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(check, "train_pipe", broken)
    status, out, _ = run(capsys, "--devices", "cpu", "--seconds", "0")
    assert status == 1
    assert "RuntimeError: no such kernel" in out
    assert "WRONG on cpu: 1 case" in out


def test_an_interrupt_ends_it(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "train_pipe", interrupted)
    threads = torch.get_num_threads()
    assert run(capsys, "--devices", "cpu", "--seconds", "0") == (130, "", "")
    assert torch.get_num_threads() == threads


@pytest.mark.usefixtures("first_case_only")
def test_a_terminal_is_shown_what_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(check_device.sys, "stderr", terminal)
    assert main(["check-device", "--devices", "cpu", "--seconds", "0"]) == 0
    assert "cpu: stages on cpu cpu cpu, batch on cpu, way gpipe" in terminal.getvalue()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "cpu", "cpu"], "'cpu' twice"),
        (["--devices", "meta"], "nothing is computed"),
        (["--devices", "99"], "--devices is 99"),
        (["--devices", "gpu"], "which PyTorch does not know"),
        (["--seconds", "-1"], "wanted a number of seconds"),
    ],
)
def test_bad_arguments(capsys: Any, arguments: list[str], message: str) -> None:
    status, _, errors = run(capsys, *arguments)
    assert status == 2
    assert message in errors


@pytest.mark.gpu
def test_an_accelerator_is_all_right(capsys: Any) -> None:
    status, out, _ = run(capsys, "--devices", "0", "cpu", "--seconds", "0")
    assert status == 0, out
    assert "cpu -> " in out


@pytest.mark.gpu
@pytest.mark.usefixtures("first_case_only")
def test_two_accelerators_are_all_right(capsys: Any) -> None:
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two accelerators")
    status, out, _ = run(capsys, "--devices", "0", "1", "--seconds", "0")
    assert status == 0, out


@pytest.mark.gpu
@pytest.mark.usefixtures("first_case_only")
def test_a_link_that_gives_other_values_is_named(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_one = Link._copy

    def off(self: Link, tensor: torch.Tensor) -> torch.Tensor:
        copy = copy_one(self, tensor)
        # On the stream of the copy; a change on the host would be a race.
        return (copy.detach() * 1.5).requires_grad_(copy.requires_grad) if copy.device.type != "cpu" else copy

    monkeypatch.setattr(Link, "_copy", off)
    status, out, _ = run(capsys, "--devices", "0", "cpu", "--seconds", "0")
    assert status == 1
    assert "WRONG on" in out
    assert "step 0: " in out
    assert not any(line.startswith("  cpu  ") and "WRONG" in line for line in out.splitlines())
