"""Measured timelines of real steps: recordings, pictures below the prediction, and traces."""

from pipework.timeline.recording import Recording
from pipework.timeline.trace import trace, trace_json

__all__ = ["Recording", "trace", "trace_json"]
