"""Bytes, traffic and time of a run, from its configuration alone; nothing is built and no rank is started.

activations.py (what a micro-batch keeps), footprint.py (what a run keeps), memory.py (its fullest moment), ways.py (the
same run in other ways), remedies.py (what would make it smaller), cheapest.py (the cheapest way to fit), shortage.py
(an out-of-memory error explained), report.py (all of it as records), table.py (and as text), needs.py (the run that was
asked for, and what is in its way), command.py (`python -m megatron.plan`, and `--dry-run` of training).
"""
