"""Traces of a few training steps by torch.profiler, with a line that says where the time went.

trace_window.py profiles the steps and writes the files; time_breakdown.py computes the line.
"""
