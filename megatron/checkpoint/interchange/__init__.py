"""Checkpoints of other programs, and ours for them.

zero_to_fp32.py (one fp32 state dict of a tag; needs no other file, a copy lies beside the tags), fp32.py (DeepSpeed's
functions over it), foreign.py (another program's weights under our names, read like a checkpoint of ours),
huggingface.py, nanogpt.py and megatron_lm.py (the names and orders of each), convert.py (both ways).
"""
