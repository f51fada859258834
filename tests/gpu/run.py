"""What somebody with an NVIDIA GPU runs: `make test-gpu`, at most five minutes.

The tests marked `gpu`, captured steps, two ranks through NCCL, parts of the card as devices, and `check-device`. At the
end there is a table, above it the output of what has failed, and the exit status is 0 only if nothing has. The results
are written to `benchmarks/results/DATE-test_gpu.json`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks import harness
from benchmarks.gpu.card import Card
from benchmarks.harness import Verdict

ROOT = Path(__file__).resolve().parents[2]
ALL = 300.0  # seconds after which no check goes on
PROCESSES = 8  # that share the card; each has a context and an allocator of its own
NO_GPU = "make test-gpu needs an NVIDIA GPU, and PyTorch finds none (`make test-accelerator` simulates one)"

Counts = tuple[int, int]
"""How many have passed, and how many have failed."""


@dataclass(frozen=True)
class Check:
    """A command that tells what has passed.

    Attributes:
        name: in the table.
        command: arguments of Python.
        seconds: after which it is ended, or earlier if all together have taken `ALL`.
        counts: from its output, and a file that it may have written, to what it has found.
    """

    name: str
    command: Sequence[str]
    seconds: float
    counts: Callable[[str, Path], Counts]


@dataclass(frozen=True)
class Found:
    """A row of the table, and the output where something has failed."""

    what: str
    passed: int
    failed: int
    seconds: float
    output: str = ""


def marked() -> list[str]:
    """The files with tests that need a card, without those of the other checks. All files take long to import."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    own = {ROOT / "tests" / folder for folder in ("accelerator", "gpu")}
    return [
        str(file.relative_to(ROOT))
        for file in files
        if "mark.gpu" in file.read_text(encoding="utf-8") and not own & {*file.parents}
    ]


def of_pytest(output: str, report: Path) -> Counts:
    """From a report as JUnit has it; skipped tests do not count."""
    suite = next(ElementTree.parse(report).iter("testsuite")).attrib
    failed = int(suite["failures"]) + int(suite["errors"])
    return int(suite["tests"]) - failed - int(suite["skipped"]), failed


def of_check_device(output: str, report: Path) -> Counts:
    """From the JSON that it prints."""
    places = json.loads(output)["places"]
    failed = sum(len(place["failures"]) for place in places)
    return sum(place["cases"] for place in places) - failed, failed


def checks(report: Path, seconds: float) -> list[Check]:
    """All of them.

    Args:
        report: where pytest may write.
        seconds: for further cases of check-device.
    """
    # Of the user's plugins one warns where tests run in several processes, and warnings are errors.
    pytest = ["-m", "pytest", "-q", "-p", "no:benchmark", "-m", "gpu and not slow", f"--junitxml={report}"]
    device = ["-m", "pipework", "check-device", "--json", "--seconds", f"{seconds:g}"]
    return [
        Check("tests marked gpu", [*pytest, "-n", str(PROCESSES), *marked()], 200.0, of_pytest),
        Check("captured steps", [*pytest, "tests/gpu/test_graphs.py"], 90.0, of_pytest),
        Check("two ranks through NCCL", [*pytest, "tests/gpu/test_nccl.py"], 120.0, of_pytest),
        Check("parts of the card as devices", [*pytest, "tests/gpu/test_parts.py"], 60.0, of_pytest),
        Check("check-device", device, 60.0 + seconds, of_check_device),
    ]


def run(check: Check, report: Path, ends: float) -> Found:
    """Runs a command to its end, or for its time. If it does not say how many have failed, one has.

    Args:
        check: which.
        report: where pytest writes.
        ends: the value of `time.perf_counter` at which all checks end.
    """
    report.unlink(missing_ok=True)
    start = time.perf_counter()
    limit = min(check.seconds, ends - start)
    if limit <= 0.0:
        return Found(check.name, 0, 1, 0.0, f"not begun: the checks before it took {ALL:g} s")
    try:
        done: Any = subprocess.run(
            [sys.executable, *check.command], cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as expired:
        parts = [part.decode() if isinstance(part, bytes) else part or "" for part in (expired.stdout, expired.stderr)]
        output = "\n".join([*parts, f"ended after {limit:.3g} s"])
        return Found(check.name, 0, 1, time.perf_counter() - start, output)
    seconds = time.perf_counter() - start
    try:
        passed, failed = check.counts(done.stdout, report)
    except (OSError, ValueError, KeyError, StopIteration, ElementTree.ParseError):
        passed, failed = 0, 0
    failed = failed or int(done.returncode != 0 or not passed)
    return Found(check.name, passed, failed, seconds, f"{done.stdout}\n{done.stderr}" if failed else "")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make test-gpu", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="of further cases of check-device (default 20); ARGS='--seconds 60'"
    )
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(NO_GPU)
        return 1
    found = []
    with tempfile.TemporaryDirectory() as folder, harness.on_this_machine() as machine:
        report, ends = Path(folder, "report.xml"), time.perf_counter() + ALL
        for check in checks(report, arguments.seconds):
            print(f"{check.name} ...", flush=True)
            found.append(run(check, report, ends))
    for each in found:
        if each.failed:
            print(f"\n== {each.what}\n{each.output}")
    print()
    rows = [[each.what, str(each.passed), str(each.failed), f"{each.seconds:.0f}"] for each in found]
    harness.print_table(["what", "passed", "failed", "seconds"], rows)
    card = Card.of("cuda:0", None).facts()
    verdicts = [Verdict(each.what, each.failed, 0, "failed") for each in found]
    results = {"card": card, "checks": [asdict(each) for each in found]}
    print(f"\n{machine}\nsaved as {harness.save('test_gpu', machine, verdicts, results)}")
    return int(any(each.failed for each in found))


if __name__ == "__main__":
    sys.exit(main())
