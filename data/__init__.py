"""Corpora, tokenizers and datasets: from text files to fixed-length samples. Usable on its own.

Imports numpy and the standard library only (tokenizer libraries where they are used), never torch and nothing of
`megatron` or `mpu`. From below upwards: `storage`, `streams`, `format`, `facts`, `sampling`, `indexed`;
`tokenizer_base`, `gpt2_bpe`, `sentencepiece_model`, `tokenizer`; `sample_index`, `gpt2_dataset`; `jsonl`, `parallel`,
`cli`, `preprocess`, `verify`, `default_corpus`, `sources`, `corpora`.
"""
