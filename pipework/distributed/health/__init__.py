"""Which ranks are alive: heartbeats, failure detection, preemption, and how a failed process ends."""
