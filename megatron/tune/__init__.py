"""The autotuner, `python -m megatron.tune`: finds the fastest settings for a model and a batch by real trials.

space.py lists the choices, search.py picks the next one by successive halving, trial.py runs it, trial_records.py
stores it.
"""
