"""Failures of processes: heartbeats, failure detection, preemption by SIGTERM, and how a failed process ends."""
