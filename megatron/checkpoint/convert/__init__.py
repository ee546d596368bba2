"""Checkpoints of other programs (Hugging Face, nanoGPT, Megatron-LM): import, export.

Begin with external_checkpoint.py and importers.py; megatron/checkpoint/tags.py tells formats apart.
"""
