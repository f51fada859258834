"""One rank in a process of its own, for tests: `python member.py '{"rank": 1, ...}'`. Prints what happens to it."""

import atexit
import json
import os
import sys
import time
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore

from pipework.distributed.health.errors import exit_code
from pipework.distributed.health.failure_detector import DetectionTimes
from pipework.distributed.health.monitor import HealthMonitor
from pipework.schedule import Action
from tests.injection import Fault


def say(event: str, **details: object) -> None:
    # One write: the monitor's threads say something, too, and between a line and its end another one could come.
    sys.stdout.write(json.dumps({"event": event, "time": time.monotonic(), **details}) + "\n")
    sys.stdout.flush()


def main() -> None:
    settings = json.loads(sys.argv[1])
    rank, ranks = settings["rank"], settings["ranks"]
    fault = Fault.parse(settings["fault"]) if settings.get("fault") else None
    server = TCPStore("127.0.0.1", settings["port"], None, False, timedelta(seconds=60), wait_for_workers=False)
    names = [f"rank {each} (stage {each})" for each in range(ranks)]
    monitor = HealthMonitor(PrefixStore("test", server), rank, names, DetectionTimes(**settings["times"]))

    def tell() -> None:
        failure = monitor.failure
        assert failure is not None
        say("told", kind=failure.kind, rank=failure.rank, text=failure.text)

    monitor.on_failure(tell)
    monitor.start()
    atexit.register(monitor.close)
    say("started")
    server.wait(["go"])
    try:
        for step in range(settings.get("steps", 10**6)):
            monitor.begin("training step")
            monitor.progress.action = Action("B", rank, 3)
            monitor.progress.count += 1
            say("step", step=step)
            if fault is not None and fault.matches(rank=rank, step=step, action="B", stage=rank, micro_batch=3):
                say("fault")
                fault.strike()
                say("survived")
            time.sleep(0.2)
            monitor.end()
    except BaseException as error:
        say("raised", text=str(error))
        monitor.report(error, "stage 1, micro-batch 3, action B")
        time.sleep(settings.get("linger", 0))
        os._exit(exit_code(error))
    time.sleep(settings.get("linger", 0))


if __name__ == "__main__":
    main()
