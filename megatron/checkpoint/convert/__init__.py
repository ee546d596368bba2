"""Checkpoints of other programs (Hugging Face, nanoGPT, Megatron-LM): detect, import, export.

Begin with import_weights.py; detect_format.py tells formats apart, and each program has a file.
"""
