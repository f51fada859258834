"""Can a schedule be executed? Found out naively: whatever can happen happens, in a random order, until nothing can.

Written from the rules in words, and sharing nothing with the library but the data.
"""


def runs(schedule, random, *, channel="unbounded", loss_outside=False, memory_limit=None):
    """Whether every action and transfer comes to its end, and no worker holds more activations than it may."""
    if not _makes_sense(schedule) or not _comes_to_an_end(schedule, random, channel, loss_outside):
        return False
    return memory_limit is None or max(map(_most, schedule.orders)) <= memory_limit


def _most(order):
    """The most activations, each of size 1, that a worker holds; a checkpointed one only while it is computed."""
    again = {(action.stage, action.micro_batch) for action in order if action.kind == "R"}
    trains = any(action.kind in "BI" for action in order)
    held, most = set(), 0
    for action in order:
        key = action.stage, action.micro_batch
        if action.kind in ("F", "R"):
            held.add(key)
            most = max(most, len(held))
        if action.kind in ("B", "W") or (action.kind == "F" and (key in again or not trains)):
            held.discard(key)
    return most


def _makes_sense(schedule):
    """All that must be there is there, once, on its worker; and everything else is a matter of waiting."""
    stages, count = schedule.stages, schedule.micro_batches
    wanted = {(stage, micro) for stage in range(stages) for micro in range(count)}
    everything = [(worker, action) for worker, order in enumerate(schedule.orders) for action in order]
    if any(schedule.placement[action.stage] != worker for worker, action in everything):
        return False
    actions = [action for _, action in everything]
    once = [action for action in actions if action.kind not in ("UNSHARD", "RESHARD")]
    if len(once) != len(set(once)):
        return False
    of = {kind: {(a.stage, a.micro_batch) for a in actions if a.kind == kind} for kind in "FBIWR"}
    if of["F"] != wanted or of["I"] != of["W"] or of["B"] & of["I"]:
        return False
    if of["B"] | of["I"] != (set() if schedule.inference else wanted):
        return False
    transfers = {action for action in actions if "_F" in action.kind or "_B" in action.kind}
    if transfers and transfers != _all_transfers(schedule):
        return False
    reduced = {action.stage for action in actions if action.kind == "REDUCE_GRAD"}
    return not reduced or reduced == set(range(stages))


def _all_transfers(schedule):
    pairs = {(stage, stage + 1) for stage in range(schedule.stages - 1)} | set(schedule.skips)
    kind_of_action = type(schedule.orders[0][0]) if schedule.orders[0] else type(schedule.orders[-1][0])
    return {
        kind_of_action(*fields)
        for source, target in pairs
        if schedule.placement[source] != schedule.placement[target]
        for micro in range(schedule.micro_batches)
        for fields in (
            ("SEND_F", source, micro, target),
            ("RECV_F", target, micro, source),
            *([] if schedule.inference else [("SEND_B", target, micro, source), ("RECV_B", source, micro, target)]),
        )
    }


def _comes_to_an_end(schedule, random, channel, loss_outside):
    explicit = any(action.peer >= 0 for order in schedule.orders for action in order)
    again = {(a.stage, a.micro_batch) for order in schedule.orders for a in order if a.kind == "R"}
    adding = [(a.kind, a.stage, a.micro_batch) for order in schedule.orders for a in order if a.kind in "BIW"]
    sharded = {a.stage for order in schedule.orders for a in order if a.kind == "UNSHARD"}
    done = set()  # (kind, stage, micro-batch) of computations
    arrived = set()  # (kind, source, target, micro-batch)
    queues = {}  # of posted transfers, each a list of actions
    whole = set()  # stages whose weights are there
    left = [list(order) for order in schedule.orders]
    forwards = {(a.kind, a.stage, a.micro_batch) for order in schedule.orders for a in order if a.kind == "F"}

    def differentiated(stage, micro):
        return ("B", stage, micro) in done or ("I", stage, micro) in done

    def came(kind, source, target, micro):
        """The value (or gradient) of one stage is at another."""
        if explicit and schedule.placement[source] != schedule.placement[target]:
            return (kind, source, target, micro) in arrived
        return ("F", source, micro) in done if kind == "F" else differentiated(source, micro)

    def free(action):
        kind, stage, micro, _ = action
        before = [s for s in [stage - 1] if s >= 0] + [a for a, b in schedule.skips if b == stage]
        behind = [s for s in [stage + 1] if s < schedule.stages] + [b for a, b in schedule.skips if a == stage]
        if kind in ("F", "B", "I", "R") and stage in sharded and stage not in whole:
            return False
        if kind in ("B", "I", "R") and loss_outside and not forwards <= done:
            return False
        if kind == "F":
            return all(came("F", source, stage, micro) for source in before)
        if kind == "R":
            return ("F", stage, micro) in done
        if kind == "W":
            return ("I", stage, micro) in done
        if kind in ("B", "I"):
            own = "R" if (stage, micro) in again else "F"
            return (own, stage, micro) in done and all(came("B", source, stage, micro) for source in behind)
        if kind == "SEND_F":
            return ("F", stage, micro) in done
        if kind == "SEND_B":
            return differentiated(stage, micro)
        if kind.startswith("RECV"):
            return True
        if kind == "UNSHARD":
            return stage not in whole
        if kind == "RESHARD":
            return stage in whole
        return all(each in done for each in adding if each[1] == stage)  # REDUCE_GRAD

    def queue_of(action, worker):
        kind, stage, _, peer = action
        if channel == "worker":
            return worker
        ends = (stage, peer) if kind.startswith("SEND") else (peer, stage)
        return kind[:4], schedule.placement[ends[0]], schedule.placement[ends[1]]

    def carry():
        """One transfer, if one can take place."""
        heads = [queue[:1] if channel != "unbounded" else queue for queue in queues.values()]
        heads = [action for head in heads for action in head]
        for action in heads:
            kind, stage, micro, peer = action
            if not kind.startswith("SEND"):
                continue
            receive = type(action)(f"RECV{kind[4:]}", peer, micro, stage)
            if receive in heads:
                for queue in queues.values():
                    for side in (action, receive):
                        if side in queue:
                            queue.remove(side)
                arrived.add((kind[-1], stage, peer, micro))
                return True
        return False

    moved = True
    while moved:
        moved = False
        workers = list(range(schedule.workers))
        random.shuffle(workers)
        for worker in workers:
            if left[worker] and free(left[worker][0]):
                action = left[worker].pop(0)
                if action.peer >= 0:
                    queues.setdefault(queue_of(action, worker), []).append(action)
                elif action.kind == "UNSHARD":
                    whole.add(action.stage)
                elif action.kind == "RESHARD":
                    whole.discard(action.stage)
                else:
                    done.add(action[:3])
                moved = True
        while carry():
            moved = True
    return not any(left) and not any(queues.values())
