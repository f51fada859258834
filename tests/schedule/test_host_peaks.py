from pipework.schedule import build, with_offload, with_recompute
from pipework.schedule.host_peaks import host_peaks


def test_buffers_serve_again_and_inputs_go_for_micro_batches_that_are_recomputed() -> None:
    plain = build("gpipe", workers=2, chunks=4)
    moving = with_offload(plain)  # three of four go on each worker
    sizes = [[5, 2], [7]], [[3], [1]]
    assert host_peaks(moving, *sizes) == [3 * 7, 3 * 7]
    assert host_peaks(with_offload(with_recompute(plain, 4)), *sizes) == [0, 3 * 1]  # the caller has those of the first
    assert host_peaks(plain, *sizes) == [0, 0]
    # Two are away at once, however many there are in a step.
    few, many = (host_peaks(with_offload(build("1f1b", workers=3, chunks=n)), [[4]] * 3, [[1]] * 3) for n in (8, 16))
    assert few == many
