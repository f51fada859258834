"""What this library writes, PyTorch's runtime loads; what PyTorch's schedules are, this library loads."""

import pytest
from torch.distributed.pipelining import schedules as peer

from benchmarks.receive_order import theirs
from pipework.schedule import (
    SCHEDULES,
    Costs,
    build,
    from_csv,
    simulate,
    to_csv,
    validate,
    with_communication,
    with_gradient_reduction,
)

# With transfers, PyTorch 2.15 wants waits, too, which are not written.
FORMS = ["compute_only", *([] if hasattr(peer, "WAIT_SEND_F") else ["compute_comms"])]
SIZES = [(1, 4), (2, 4), (4, 8), (4, 4), (8, 16)]


def runtime(schedule):
    stages = [theirs.Stage(index, schedule.workers, schedule.stages, 0) for index in schedule.stages_of(0)]
    return peer._PipelineScheduleRuntime(stages, schedule.micro_batches, loss_fn=theirs.loss_fn)


def comes_to_an_end(loaded, schedule):
    """PyTorch's own simulation, which does not know what is neither computed nor sent."""
    unknown = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD")
    orders = {
        rank: [action for action in order if action.computation_type.value not in unknown]
        for rank, order in loaded.pipeline_order_with_comms.items()
    }
    assert peer._simulate_comms_compute(orders, lambda stage: schedule.placement[stage], schedule.stages)


def accepts(schedule, form, folder):
    file = folder / f"{schedule.workers}.csv"
    lowered = with_communication(with_gradient_reduction(schedule), channel="worker")
    file.write_text(to_csv(schedule if form == "compute_only" else lowered))
    loaded = runtime(schedule)
    loaded._load_csv(str(file), format=form)
    assert loaded.stage_index_to_group_rank == dict(enumerate(schedule.placement))
    computing = [
        [str(action) for action in order if action.is_compute_op] for order in loaded.pipeline_order_with_comms.values()
    ]
    assert computing == [[str(action) for action in order] for order in schedule.orders]
    comes_to_an_end(loaded, schedule)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"forward-only"}))  # theirs must have backwards
def test_pytorch_loads_and_accepts_every_schedule(name, form, tmp_path):
    for workers, chunks in [*SIZES, (3, 2), (3, 7)]:
        accepts(build(name, workers=workers, chunks=chunks), form, tmp_path)


@pytest.mark.parametrize("kind", [*theirs.SEVERAL, "ScheduleGPipe"])
def test_pytorchs_schedules_load_here(kind):
    for workers, chunks in SIZES:
        if workers == 1 or (kind == "ScheduleDualPipeV" and chunks < 2 * workers):
            continue
        schedule = from_csv(theirs.compute_only(kind, workers, chunks), name=kind)
        assert validate(schedule).ok
        assert (schedule.workers, schedule.micro_batches) == (workers, chunks)
        own = build(kind, workers=workers, chunks=chunks)
        assert schedule.placement == own.placement
        share = Costs(workers / schedule.stages, 2 * workers / schedule.stages)
        assert simulate(own, share).makespan <= simulate(schedule, share).makespan + 1e-9
        if kind in theirs.SEVERAL:
            lowered = from_csv(theirs.compute_comms(kind, workers, chunks))
            assert lowered.communicates
            assert validate(lowered, channel="pair").ok
