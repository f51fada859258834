"""Timelines of real steps: recorded by the pipe, drawn above what the schedule predicts, or traced."""

from pipework.schedule.draw.png import png
from pipework.timeline.recording import Recording
from pipework.timeline.trace import trace, trace_json

__all__ = ["Recording", "png", "trace", "trace_json"]
