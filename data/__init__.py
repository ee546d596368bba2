"""Corpora, tokenizers and datasets: from text files to fixed-length samples. Usable on its own.

Imports numpy and the standard library only (tokenizer libraries where they are used), never torch and nothing of
`megatron` or `mpu`. From below upwards: `storage`, `format`, `indexed`, `tokenizer`, `sampling`, `sample_index`,
`gpt2_dataset`, `jsonl`, `parallel`, `preprocess`, `default_corpus`, `corpora`, `verify`.
"""
