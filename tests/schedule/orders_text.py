"""Schedules as short texts, for tests."""

from pipework.schedule import Action, Schedule


def to_orders_text(schedule: Schedule) -> str:
    lines = [f"schedule {schedule.name}", "placement " + " ".join(map(str, schedule.placement))]
    if schedule.skips:
        lines.append("skips " + " ".join(f"{source}-{target}" for source, target in schedule.skips))
    if schedule.inference:
        lines.append("inference")
    for worker, order in enumerate(schedule.orders):
        lines.append(" ".join(["worker", str(worker), *map(str, order)]))
    return "\n".join(lines)


def from_orders_text(text: str) -> Schedule:
    """Of lines such as `schedule NAME`, `placement 0 1`, `worker 0 0F0 0B0`, `worker 1 1F0 1B0`."""
    rows = [line.split() for line in text.strip().splitlines()]
    orders = tuple(tuple(map(Action.parse, words)) for head, _, *words in rows[2:])
    return Schedule(rows[0][1], tuple(map(int, rows[1][1:])), orders)
