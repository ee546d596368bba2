"""The autotuner, `python -m megatron.tune`: finds the fastest settings for a model and a batch by real trials.

search.py lists the choices and picks the next one by successive halving, trial.py runs and records it, cli.py is the
command and its report.
"""
