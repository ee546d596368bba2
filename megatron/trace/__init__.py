"""Traces of a few training steps for ui.perfetto.dev, with a one-line breakdown of where the time went.

trace_window.py starts and stops torch.profiler, recorder.py records the engine's status, export.py writes the
files.
"""
