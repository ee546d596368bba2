"""Bytes and traffic of a run, from its configuration alone; nothing is built and no rank is started.

activations.py (what a micro-batch keeps), footprint.py (what a run keeps), memory.py (its fullest moment), remedies.py
(what would make it smaller), shortage.py (an out-of-memory error explained), command.py (`python -m megatron.plan`).
"""
