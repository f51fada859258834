import torch

from pipework.profiling.links import measure_links


def test_threads_hand_over_without_copying() -> None:
    lines: list[str] = []
    ((ends, speed),) = measure_links({"cpu": torch.device("cpu")}, lines.append).items()
    assert ends == ("cpu", "cpu")
    assert 0 < speed.latency < 0.1
    assert speed.seconds(2**40) < speed.latency + 0.01
    assert lines[0].startswith("cpu to cpu: ")
