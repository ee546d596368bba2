"""Corpora, tokenizers and datasets: from text files to fixed-length samples. Usable on its own.

Imports numpy and the standard library only (tokenizer libraries where they are used), never torch and nothing of
`megatron` or `mpu`. From below upwards:

    storage.py, lock.py, held.py, identity.py, format.py, facts.py, indexed.py    a corpus on disk
    draft.py, writer.py                            writing one
    pages.py, sampling.py, sample_index.py, gpt2_dataset.py    fixed-length samples of it
    tokenizer_base.py, bpe_engines.py, fast_tokenizer.py, gpt2_bpe.py, sentencepiece_model.py, tokenizer.py
                                                   text <-> token ids
    inputs.py, compressed.py, chunks.py, jsonl.py, plain_text.py    files of text -> documents
    cli.py, parallel.py                            what commands share; an ordered map over processes
    recorded.py                                    whether shards of webtext are what was written down of them
    preprocess.py, importers.py, merge.py, split_json.py, verify.py, default_corpus.py    the commands
    sources.py, cached.py, corpora.py              what `--train-data` names, and the datasets made from it

webtext/ makes a corpus from pages of the web.
"""
