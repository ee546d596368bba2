"""DeepSpeed's names over inference: `megatron.inference.init_inference`, and the engine it returns.

    arguments.py        every argument of DeepSpeed's call: what it means here, or what to do instead
    policy.py           which layers of a model that is not ours are cut, and how: the plan of a cut
    cut.py              the plan done: each rank keeps its part of the layers
    same.py             whether all ranks were given the same
    proof.py            the cut model computes what the whole one did on an example, or is refused
    quantise.py         int8 weights for the layers that are cut
    weights.py          where the weights of a GPT-2 come from: a checkpoint, or a model in memory, of transformers too
    answer.py           `generate` as transformers types it, over a decoder that stays from answer to answer
    engine.py           what a script holds
    init_inference.py   the call
"""
