"""What a trained model is for: text from it.

    source.py       which model, as flags say it
    request.py      what is asked of it: prompts, how tokens are drawn, where a text ends
    cache.py        keys and values of what has been read
    decoder.py      the model over a cache: read a prompt, follow with a token of each text
    sampling.py     the next token of one text, from its logits
    generation.py   many texts at a time; one that ends makes room for the next
    wording.py      the words of a text that is being made
    loading.py      a model from a checkpoint or a Hugging Face folder, at any tensor parallel size: this rank's part
    answers.py      prompts in, text out, in order
    command.py      python -m megatron.generate
"""
