"""Record the events and decisions of a scheduler, and replay them: the same decisions, byte for byte."""

from vsched.record.recorder import Recorder, check_record_path, open_recorder
from vsched.record.replay import ReplayReport, read_events, replay
from vsched.record.timeline import TraceTimeline

__all__ = [
    "Recorder",
    "ReplayReport",
    "TraceTimeline",
    "check_record_path",
    "open_recorder",
    "read_events",
    "replay",
]
