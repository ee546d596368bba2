"""Checkpoints of other programs (Hugging Face, nanoGPT, Megatron-LM): detect, import, export.

Begin with external_checkpoint.py and importers.py; detect_format.py tells formats apart.
"""
