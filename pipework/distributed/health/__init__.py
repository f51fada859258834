"""Failures of processes: how they are noticed, reported and survived.

* `monitor`: `HealthMonitor`, through which the rest of the library uses this folder.
* `heartbeat`: the threads that write and read heartbeats.
* `failure_detector`: which other rank has failed, by its heartbeats.
* `process_calls`: where a process is in the calls of all its pipes.
* `stuck_detector`: whether an action of this rank takes too long.
* `detection_times`: after how many seconds a rank is lost.
* `progress`: what this rank is doing now.
* `status`: the messages that ranks write to the store.
* `store_client`: a connection to the store.
* `preemption`: after SIGTERM to any rank, all stop after the same step.
* `errors`: `PipelineError`, and exit codes.
* `process_exit`: how a failed process ends.
"""
