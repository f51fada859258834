from pipework.schedule import Action, Costs, fill_drain, simulate


def test_orders_are_a_parallelogram():
    # One column per unit of time, one row per worker, at equal costs.
    expected = """
        0F0 0F1 0F2 0F3  .   .   .   .  0B0 0B1 0B2 0B3
         .  1F0 1F1 1F2 1F3  .   .  1B0 1B1 1B2 1B3  .
         .   .  2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3  .   .
    """
    rows = [line.split() for line in expected.strip().splitlines()]
    schedule = fill_drain(workers=3, micro_batches=4)
    assert schedule.orders == tuple(tuple(Action.parse(cell) for cell in row if cell != ".") for row in rows)

    columns = {
        (interval.worker, int(interval.start)): str(interval.action)
        for interval in simulate(schedule, Costs(backward=1)).timeline.intervals
    }
    drawn = [[columns.get((worker, column), ".") for column in range(12)] for worker in range(3)]
    assert drawn == rows
