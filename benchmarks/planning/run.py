"""How much faster is a planned pipeline than what other libraries would choose?

Simulated from the profiles in this folder, with the same code for all: nothing here depends on the machine.

* "by parameters": cuts of equal parameters and 1F1B, as DeepSpeed's `partition_method="parameters"` does.
* "even": cuts of equal numbers of layers and GPipe, as accelerate's `prepare_pippy` does.
* "torch": cuts of equal numbers of layers and interleaved 1F1B, which tutorials of torch.distributed.pipelining show.
* "uniform": blocks in equal numbers, as one would cut by hand, with 1F1B and with ZB-V.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import inf
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Verdict
from pipework.assignment.minimax import minimax_partition
from pipework.planning import Profile
from pipework.planning.candidate import Candidate
from pipework.planning.request import PlanRequest, make_request
from pipework.planning.search import plan_profile
from pipework.schedule import SCHEDULES

FOLDER = Path(__file__).parent / "profiles"


@dataclass(frozen=True)
class Case:
    """A model on devices.

    Attributes:
        name: of its profile.
        devices: of each worker.
        chunks: those to choose from; None: any.
        memory: of each device; None: as the profile says, or none. "zb-v": what a uniform ZB-V needs.
        block: the layers that one cuts by hand as one, for "uniform"; the last layer goes with the last of them.
        target: to reach, in the profile's unit; None: faster than all others.
    """

    name: str
    devices: tuple[str, ...]
    chunks: tuple[int, ...] | None = None
    memory: str | None = None
    block: int = 1
    target: float | None = None


CASES = (
    Case("llama3_8b", ("device",) * 8, (32,), "zb-v", 3, target=100.0),
    Case("gpt2", ("device",) * 4, (16, 32, 64)),
    Case("unet", ("device",) * 4, (16, 32, 64)),
    Case("unet_unequal", ("large", "small"), (16, 32, 64)),
)


def others(request: PlanRequest, case: Case) -> dict[str, Candidate]:
    """What others choose, each with its best number of micro-batches."""
    layers = request.profile.layers
    workers = len(request.devices)
    order = tuple(range(workers))

    def best(schedule: str, balance: list[int]) -> Candidate:
        stages_per_worker = len(balance) // workers
        placement = SCHEDULES[schedule].placement(workers, stages_per_worker)
        return min(
            (
                Candidate(request, order, placement, chunks, schedule, tuple(balance), (0,) * len(balance))
                for chunks in request.chunks
            ),
            key=lambda candidate: candidate.seconds,
        )

    parameters = minimax_partition([layer.weights for layer in layers], workers)
    found = {
        "by parameters, 1F1B": best("1f1b", parameters),
        "even, GPipe": best("gpipe", even(len(layers), workers)),
        "torch, interleaved 1F1B": best("interleaved-1f1b", even(len(layers), 2 * workers)),
    }
    for name in ("1f1b", "zb-v"):
        stages = workers * SCHEDULES[name].stages_per_worker
        blocks = even(len(layers) // case.block, stages)
        balance = [case.block * count for count in blocks]
        balance[-1] += len(layers) - sum(balance)
        found[f"uniform, {name}"] = best(name, balance)
    return found


def even(layers: int, parts: int) -> list[int]:
    """Parts whose numbers of layers differ by one at most."""
    return [layers // parts + (index < layers % parts) for index in range(parts)]


def measure(case: Case, seconds: float, iterations: int | None) -> dict[str, object]:
    """The plan beside the choices of others."""
    profile = Profile.load(FOLDER / f"{case.name}.json")
    request = make_request(profile, case.devices, chunks=case.chunks)
    theirs = others(request, case)
    memory = max(held.total for held in theirs["uniform, zb-v"].workers) if case.memory == "zb-v" else None
    began = time.perf_counter()
    plan = plan_profile(
        profile, case.devices, memory, chunks=case.chunks, seconds=seconds, iterations=iterations,
        progress=lambda _: None,
    )  # fmt: skip
    return {
        "model": case.name,
        "workers": len(case.devices),
        "others": {
            name: (each.seconds, max(held.total for held in each.workers), each.fits) for name, each in theirs.items()
        },
        "plan": (plan.seconds, max(held.total for held in plan.workers)),
        "schedule": plan.schedule.name,
        "chunks": plan.chunks,
        "bound": plan.bound,
        "searched": time.perf_counter() - began,
        "target": case.target,
        "memory": memory,
    }


def main(argv: list[str] | None = None) -> None:
    options = harness.Options(__doc__)
    options.add_argument("--seconds", type=float, default=60.0, help="to search for each model (default 60)")
    options.add_argument("--iterations", type=int, help="candidates to try instead")
    options.add_argument("--only", choices=[case.name for case in CASES], help="one model")
    arguments = options.parse_args(argv)
    cases = [case for case in CASES if arguments.only in (None, case.name)]
    with harness.on_this_machine() as machine:
        results = [measure(case, 3.0 if arguments.quick else arguments.seconds, arguments.iterations) for case in cases]
    verdicts = []
    rows = []
    for each in results:
        unit = 1.0 if each["target"] else 1e3
        step, held = each["plan"]
        best = min((seconds for seconds, _, fits in each["others"].values() if fits), default=inf)
        for name, (seconds, size, fits) in each["others"].items():
            note = "" if fits else "does not fit"
            rows.append([each["model"], name, f"{unit * seconds:.4g}", f"{size / 2**30:.3g} GiB", note])
        found = f"{each['schedule']}, {each['chunks']} micro-batches"
        rows.append([each["model"], f"plan: {found}", f"{unit * step:.4g}", f"{held / 2**30:.3g} GiB", ""])
        rows.append([each["model"], "bound of its stages", f"{unit * each['bound']:.4g}", "", ""])
        target = each["target"] or unit * best
        verdicts.append(Verdict(f"{each['model']}, a step", unit * step, target, "units" if each["target"] else "ms"))
    harness.print_table(["model", "choice", "step", "largest device", ""], rows)
    harness.conclude("planning", arguments, machine, verdicts, {"cases": results})


if __name__ == "__main__":
    main()
