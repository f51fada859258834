from pipework.schedule.analysis.channels import WorkerRoute, channels

THERE = WorkerRoute(number=0, sender=0, receiver=1, delay=2.0)
BACK = WorkerRoute(number=1, sender=1, receiver=0, delay=3.0)


def carried(channel, *posts):
    """(route, micro-batch), start, end and cause of the transfers that these posts lead to."""
    open_channels = channels(channel)
    found = [open_channels.post(way, number, time, sends=sends) for way, number, time, sends in posts]
    return [tuple(transfer) for transfers in found for transfer in transfers]


def test_unbounded_channels_wait_for_nobody():
    posts = [(THERE, 0, 5.0, True), (THERE, 1, 5.0, True), (THERE, 1, 0.0, False)]
    assert carried("unbounded", *posts) == [((0, 0), 5, 7, True), ((0, 1), 5, 7, True)]


def test_a_pair_transfers_one_after_the_other_when_both_are_there():
    posts = [(THERE, 0, 5.0, True), (THERE, 1, 5.5, True), (THERE, 0, 1.0, False), (THERE, 1, 1.0, False)]
    assert carried("pair", *posts) == [((0, 0), 5, 7, True), ((0, 1), 7, 9, (0, 0))]
    posts = [(THERE, 0, 5.0, True), (THERE, 0, 6.0, False)]
    assert carried("pair", *posts) == [((0, 0), 6, 8, False)]


def test_a_pair_never_comes_over_another_order():
    posts = [(THERE, 0, 0.0, True), (THERE, 1, 0.0, True), (THERE, 1, 0.0, False), (THERE, 0, 0.0, False)]
    assert carried("pair", *posts) == []


def test_directions_of_a_pair_do_not_know_each_other():
    posts = [(THERE, 0, 0.0, True), (BACK, 0, 1.0, True), (BACK, 0, 0.0, False), (THERE, 0, 0.0, False)]
    assert carried("pair", *posts) == [((1, 0), 1, 4, True), ((0, 0), 0, 2, True)]


def test_one_queue_for_a_worker_holds_up_what_is_behind_an_early_receive():
    early = [(BACK, 0, 0.0, False), (THERE, 0, 1.0, True), (THERE, 0, 0.0, False)]
    # Worker 1 wants to receive first, and worker 0 as well: both wait for ever.
    assert carried("worker", *early, (BACK, 0, 4.0, True)) == []
    # If worker 1 sends before it receives, they go on, but only then.
    early = [(BACK, 0, 0.0, False), (THERE, 0, 1.0, True), (BACK, 0, 4.0, True), (THERE, 0, 4.0, False)]
    assert carried("worker", *early) == [((1, 0), 4, 7, True), ((0, 0), 7, 9, (1, 0))]
