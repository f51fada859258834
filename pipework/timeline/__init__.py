"""Measured timelines of real steps: recordings, pictures below the prediction, and traces."""

from pipework.schedule.draw.png import png
from pipework.timeline.recording import Recording
from pipework.timeline.trace import trace, trace_json

__all__ = ["Recording", "png", "trace", "trace_json"]
