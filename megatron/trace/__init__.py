"""Traces of a few training steps by torch.profiler, with a line that says where the time went: trace_window.py."""
