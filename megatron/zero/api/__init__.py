"""DeepSpeed's names over the mechanism: what a training script calls.

initialize.py (`zero.initialize`), engine.py (`Engine`, what it returns), optimizer.py (the optimizer beside it),
init.py (`zero.Init`, `zero.GatheredParameters`), saved.py (the engine's state <-> a checkpoint), estimate.py (rules of
thumb).
"""
