"""Failures of processes: how they are noticed, reported and survived.

* `monitor`: `HealthMonitor`, with the threads that write and read heartbeats.
* `failure_detector`: which rank has failed: by the heartbeats of the others, by the calls of all pipes, by the time of
  an action of this one.
* `status`: the messages that ranks write to the store.
* `store_client`: a connection to the store.
* `preemption`: after SIGTERM to any rank, all stop after the same step.
* `errors`: `PipelineError`, and exit codes.
* `process_exit`: how a failed process ends.
"""
