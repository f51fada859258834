from pipework.schedule import one_forward_one_backward, with_communication


def rows(schedule):
    return [" ".join(map(str, order)) for order in schedule.orders]


def test_sends_follow_their_actions_and_receives_come_one_action_early():
    assert rows(with_communication(one_forward_one_backward(2, 3))) == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0F2 0SEND_F2 0RECV_B2 0B1 0B2",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2",
    ]


def test_one_queue_for_each_worker_has_receives_in_the_order_of_time():
    assert rows(with_communication(one_forward_one_backward(2, 2), channel="worker")) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]
