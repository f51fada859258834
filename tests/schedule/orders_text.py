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


def schedule_of(text: str, placement: tuple[int, ...] | None = None) -> Schedule:
    """Of a line for each worker, such as `0F0 0B0`; stage s is on worker s unless there is a placement."""
    orders = [tuple(map(Action.parse, line.split())) for line in text.strip().splitlines()]
    return Schedule("test", placement or tuple(range(len(orders))), orders)
