"""Timelines of real steps: recorded by the pipe, drawn above what the schedule predicts, or traced."""

from pipework.timeline.recording import Entry, Recording
from pipework.timeline.trace import trace, trace_json

__all__ = ["Entry", "Recording", "trace", "trace_json"]
