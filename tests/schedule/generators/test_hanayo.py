from pipework.schedule import Costs, hanayo, simulate


def test_waves_transfer_nothing_at_their_turns():
    assert simulate(hanayo(1, 4, 6), Costs(transfer=100)).bubble == 0
