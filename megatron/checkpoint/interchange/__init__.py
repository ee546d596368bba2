"""Checkpoints of other programs, and ours for them.

    recorded.py      what a checkpoint of ours records of its GPT-2: shape, precision, tokenizer
    names.py         what each program calls the parameters: one table per program
    foreign.py       another program's weights under our names, read like a checkpoint of ours
    huggingface.py, nanogpt.py, megatron_lm.py    the files of each
    tokenizers.py    our tokenizer in Hugging Face's files
    convert.py       from them to us
    zero_to_fp32.py  one fp32 state dict of a tag; a copy of this one file lies beside the tags
    fp32.py          DeepSpeed's functions over it
"""
