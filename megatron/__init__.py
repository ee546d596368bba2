"""The application: config, model, ZeRO engine, optimizer, training, checkpoint and tools.

Importing this package imports nothing heavy; `from megatron import zero, recompute` loads the engine.
"""
