"""Bytes, traffic and time of a run, from its configuration alone; nothing is built and no rank is started.

activations.py (what a micro-batch keeps), footprint.py (what a run keeps), memory.py (its fullest moment), ways.py (the
same run in other ways), remedies.py (what would make it smaller), cheapest.py (the cheapest way to fit), shortage.py
(an out-of-memory error explained), rates.py (how fast a machine is), exchange.py (what ranks send and when they meet),
time.py (and so, how long a step takes), report.py (all of it as records), table.py (and as text), forecast.py (the time
as text, beside what was measured), needs.py (the run that was asked for, and what is in its way), command.py (`python
-m megatron.plan`, and `--dry-run` of training).

Rates are measured: probe.py in ranks of its own, with stopwatch.py (their clock), small_models.py (steps of the real
engine) and sizes.py (how large), fills a sighting.py, from which they are derived.py; kept_rates.py starts it on what
gpus.py finds, and keeps what it measures.
"""
