"""Corpora, tokenizers and datasets: from text files to fixed-length samples. Usable on its own.

Imports numpy and the standard library only (tokenizer libraries where they are used), never torch and nothing of
`megatron` or `mpu`. Begin with indexed.py (a corpus on disk), writer.py and preprocess.py (making one), then
gpt2_dataset.py and sources.py (samples, and what `--train-data` names). webtext/ makes a corpus from web pages.
"""
