"""What does a pipe cost on a GPU, and how much faster are two or four of its parts than one of them?

On one card: the plain model, pipes of one stage, and pipes whose workers have parts of the card of their own, disjoint
sets of its multiprocessors (SMs). Each case runs in a process of its own, for a limited time; a case that fails is a
line with its error, and the others go on. On the CPU (`--device cpu`) tiny models show that the script works.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import harness
from benchmarks.gpu.card import Card
from benchmarks.gpu.cases import CASES
from benchmarks.gpu.measure import Measured, Outcome, measure
from benchmarks.gpu.ways import AT_ONCE, GRAPHS
from benchmarks.harness import Verdict

NAME = "gpu"
FAILED = 1
ALL = 400.0  # seconds after which no case goes on
COLUMNS = (
    "ms", "fastest", "host ms", "us/action", "tokens/s", "MFU", "GiB", "of plain", "ideal", "bubble", "predicted",
    "gradients",
)  # fmt: skip


def options() -> harness.Options:
    parser = harness.Options(__doc__)
    parser.add_amount("--rounds", 6, 3, "of each way, at most")
    parser.add_amount("--seconds", 4.0, 1.0, "about how long the rounds of a case may take")
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES), help="(default: all)")
    parser.add_argument("--device", choices=["cuda:0", "cpu"], default="cuda:0", help="cpu: to try the script")
    parser.add_argument(
        "--limit", type=float, default=90.0, help="seconds after which each of several cases is ended (default 90)"
    )
    parser.add_argument(
        "--peak-tflops", type=float, help="of the card in dense bfloat16, for the MFU (default: known for some cards)"
    )
    parser.add_argument("--json", type=Path, help="where to write what one case took, besides")
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = options().parse_args(argv)
    if torch.device(arguments.device).type == "cuda" and not torch.cuda.is_available():
        print("the benchmark gpu needs an NVIDIA GPU, and PyTorch finds none here: nothing is measured")
        return 0
    return one_case(arguments) if len(arguments.case) == 1 else all_cases(arguments)


def one_case(arguments: argparse.Namespace) -> int:
    """Measures a case in this process."""
    (name,) = arguments.case
    card = Card.of(arguments.device, arguments.peak_tflops)
    case = CASES[name](card)
    if case is None:
        return 0
    with harness.on_this_machine() as machine:
        outcome = measure(case, card, arguments.rounds, arguments.seconds)
    if torch.distributed.is_initialized():  # for the pipe of PyTorch
        torch.distributed.destroy_process_group()
    verdicts = report(name, outcome, card)
    content = {"card": card.facts(), "cases": {name: asdict(outcome)}}
    if arguments.json is not None:
        found = {**content, "verdicts": [vars(verdict) for verdict in verdicts]}
        arguments.json.write_text(json.dumps(found), encoding="utf-8")
    else:
        harness.conclude(f"{NAME}_{name}", arguments, machine, verdicts, content)
    return FAILED if outcome.errors else 0


def all_cases(arguments: argparse.Namespace) -> int:
    """Measures each case in a process, and saves after each what there is by then."""
    verdicts: list[Verdict] = []
    content: dict[str, Any] = {"card": {}, "cases": {}}
    status, ends = 0, time.monotonic() + ALL
    with harness.on_this_machine() as machine, tempfile.TemporaryDirectory() as folder:
        for name in arguments.case:
            path = Path(folder, f"{name}.json")
            error = in_a_process(arguments, name, path, min(arguments.limit, ends - time.monotonic()))
            status = FAILED if error else status
            if path.exists():
                found = json.loads(path.read_text(encoding="utf-8"))
                content["card"] = found["card"]
                content["cases"] |= found["cases"]
                verdicts += [Verdict(**each) for each in found["verdicts"]]
            elif error:
                content["cases"][name] = {"errors": {name: error}}
                print(f"FAILED: {name}: {error}", flush=True)
            if arguments.save:
                harness.save(NAME, machine, verdicts, content)
    harness.conclude(NAME, arguments, machine, verdicts, content)
    return status


def in_a_process(arguments: argparse.Namespace, name: str, path: Path, limit: float) -> str:
    """Runs this script for one case; its output goes to this one's.

    Args:
        arguments: of the command line.
        name: of the case.
        path: where it writes what it found.
        limit: seconds after which it is ended.

    Returns:
        What went wrong; empty: nothing did.
    """
    if limit <= 0.0:
        return f"not begun: the cases before it took {ALL:g} s"
    command = [
        *(sys.executable, "-m", "benchmarks.gpu.run", "--case", name, "--json", str(path)),
        *("--device", arguments.device, "--rounds", str(arguments.rounds), "--seconds", str(arguments.seconds)),
        *([] if arguments.peak_tflops is None else ["--peak-tflops", str(arguments.peak_tflops)]),
    ]
    sys.stdout.flush()
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = subprocess.run(command, timeout=limit, check=False).returncode
        return "" if code == 0 else f"its process ended with status {code}"
    return f"ended after {limit:.3g} s"


def report(name: str, outcome: Outcome, card: Card) -> list[Verdict]:
    """Prints the table of a case and its errors; returns the verdicts: about speed only those of a GPU."""
    print(f"\n{name}: times in ms, medians\n")
    if outcome.measured:
        plain = next(iter(outcome.measured.values()))
        rows = [[way, *_cells(each, plain)] for way, each in outcome.measured.items()]
        harness.print_table(["", *COLUMNS], rows)
    for way, error in outcome.errors.items():
        print(f"FAILED: {name}, {way}: {error}")
    print(flush=True)
    speed = [*_speed(name, outcome.measured), *_captured(name, outcome.measured)] if card.is_gpu else []
    return [*speed, *_bits(name, outcome.measured)]


def _cells(each: Measured, plain: Measured) -> Sequence[str]:
    def share(value: float | None, form: str = ".3f") -> str:
        return "" if value is None else format(value, form)

    return [
        f"{1e3 * median(each.seconds):.1f}",
        f"{1e3 * min(each.seconds):.1f}",
        f"{1e3 * median(each.host):.1f}",
        f"{1e6 * median(each.host) / each.actions:.0f}" if each.actions else "",
        f"{each.tokens:,.0f}",
        share(each.mfu, ".1%"),
        f"{each.gib:.2f}" if each.gib else "",
        f"{harness.median_ratio(each.seconds, plain.seconds):.3f}",
        *map(share, (each.ideal, each.bubble, each.predicted)),
        _gradients(each),
    ]


def _gradients(each: Measured) -> str:
    if each.difference is None:
        return "not compared"
    return "the same bits" if each.bitwise and not each.difference else f"differ by {each.difference:.1e}"


def _speed(name: str, measured: Mapping[str, Measured]) -> list[Verdict]:
    """How far a pipe of one stage is from the plain model, and the best of several parts from its ideal."""
    verdicts = []
    pipes = {way: each for way, each in measured.items() if each.ideal is not None}
    plain = measured.get("plain")
    if plain is None or not pipes:
        return []
    for way, each in pipes.items():
        if each.ideal == 1.0:
            share = harness.median_ratio(each.seconds, plain.seconds)
            verdicts.append(Verdict(f"{name}: {way}, to the plain model", share, 1.02, "x"))
    base = measured.get("plain on a half", plain)
    shares = {
        way: harness.median_ratio(each.seconds, base.seconds) / each.ideal
        for way, each in pipes.items()
        if each.ideal and each.ideal < 1.0 and each.sms > base.sms
    }
    if shares:
        best = min(shares, key=lambda way: shares[way])
        verdicts.append(Verdict(f"{name}: the best, {best}, to its ideal", shares[best], 1.2, "x"))
    return verdicts


def _captured(name: str, measured: Mapping[str, Measured]) -> list[Verdict]:
    """How far pipes with graphs are from their ideal where nothing but the device is the limit, and what the host does.

    The ideal is the schedule's, of stages that take as long as they do when all compute at the same time.
    """
    verdicts = []
    at_once, half = measured.get(AT_ONCE), measured.get("plain on a half")
    for way, each in measured.items():
        if not (each.actions and way.endswith(GRAPHS)):
            continue
        verdicts.append(Verdict(f"{name}: {way}, host for an action", 1e6 * min(each.host) / each.actions, 20.0, "us"))
        if at_once is not None and each.ideal is not None:
            parts = round(each.sms / measured["plain"].sms)
            share = harness.median_ratio(each.seconds, at_once.seconds) / (parts * each.ideal)
            verdicts.append(Verdict(f"{name}: {way}, to its ideal with contention", share, 1.15, "x"))
        if half is not None and each.ideal is not None and each.ideal < 1.0:
            share = harness.median_ratio(each.seconds, half.seconds)
            verdicts.append(Verdict(f"{name}: {way}, to the plain model on a half", share, 0.62, "x"))
    return verdicts


def _bits(name: str, measured: Mapping[str, Measured]) -> list[Verdict]:
    """Whether the gradients of pipes are those of the plain model, to the last bit."""
    exact = [
        each.difference for each in measured.values() if each.ours and each.bitwise and each.difference is not None
    ]
    what = f"{name}: the largest difference of gradients"
    return [Verdict(what, max(exact), 0.0, "of the largest element")] if exact else []


if __name__ == "__main__":
    sys.exit(main())
