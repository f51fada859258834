"""How much time does it cost to post receives in the wrong place?

Simulated, not measured: the schedules of torch.distributed.pipelining, with receives where PyTorch posts them and where
pipework posts them, on channels that keep an order. Each is compared with its own order on channels that keep none.
"""

from __future__ import annotations

from benchmarks import harness
from benchmarks.harness import Verdict
from benchmarks.receive_order.theirs import SEVERAL, compute_comms, compute_only
from pipework.schedule import Channel, Costs, Schedule, ScheduleError, from_csv, simulate

CHANNELS: tuple[Channel, ...] = ("pair", "worker")
TARGET = 0.2


def makespan(schedule: Schedule, costs: Costs, channel: Channel = "unbounded") -> float:
    """The simulated makespan; infinity if the workers deadlock."""
    try:
        return simulate(schedule, costs, channel=channel).makespan
    except ScheduleError:
        return float("inf")


def measure(kind: str, workers: int, chunks: int, transfer: float) -> dict[str, object]:
    """The makespans with receives as PyTorch posts them ("theirs") and as pipework does ("ours"), on each channel."""
    costs = Costs(transfer=transfer)
    orders = {
        "theirs": from_csv(compute_comms(kind, workers, chunks), name=kind),
        "ours": from_csv(compute_only(kind, workers, chunks), name=kind),
    }
    share = costs.placed(orders["ours"].placement)
    makespans = {
        who: {channel: makespan(schedule, share, channel) for channel in ("unbounded", *CHANNELS)}
        for who, schedule in orders.items()
    }
    return {"schedule": kind, "makespan": makespans}


def more(makespans: dict[str, float], channel: str) -> float:
    """By how many percent a channel that keeps an order takes longer."""
    return 100 * (makespans[channel] / makespans["unbounded"] - 1)


def main(argv: list[str] | None = None) -> None:
    options = harness.Options(__doc__)
    options.add_argument("--workers", type=int, default=8, help="(default 8)")
    options.add_argument("--chunks", type=int, default=32, help="micro-batches (default 32)")
    options.add_argument(
        "--transfer", type=float, default=0.05, help="of a forward of a worker's whole share (default 0.05)"
    )
    arguments = options.parse_args(argv)
    with harness.on_this_machine() as machine:
        results = [measure(kind, arguments.workers, arguments.chunks, arguments.transfer) for kind in SEVERAL]
    rows, worst = [], 0.0
    for each in results:
        theirs, ours = each["makespan"]["theirs"], each["makespan"]["ours"]
        percents = [more(makespans, channel) for makespans in (theirs, ours) for channel in CHANNELS]
        worst = max(worst, *percents[len(CHANNELS) :])
        cells = [f"{theirs['unbounded']:.5g}", f"{ours['unbounded']:.5g}", *(f"{each:.1f}%" for each in percents)]
        rows.append([str(each["schedule"]), *cells])
    columns = [f"{who}, {channel}" for who in ("PyTorch", "pipework") for channel in CHANNELS]
    harness.print_table(["", "PyTorch, unbounded", "pipework, unbounded", *columns], rows)
    size = {"workers": arguments.workers, "chunks": arguments.chunks, "transfer": arguments.transfer}
    verdicts = [Verdict("posted by pipework, the most that a channel adds", worst, TARGET, "%")]
    harness.conclude("receive_order", arguments, machine, verdicts, {"unit": "forwards", **size, "cases": results})


if __name__ == "__main__":
    main()
