"""A trained model behind HTTP: Megatron's `/api`, OpenAI's `/v1/completions`, and a page to try it.

    limits.py       how much may be asked for, how long a client may take, and how a request is refused
    message.py      a connection: a request as it comes over the wire, read strictly; a response as it goes
    door.py         who may ask: keys, and names of this host
    asked.py        what both dialects ask for, without their words; JSON read key by key
    megatron_api.py, completions.py     the dialects
    metrics.py      what is counted
    desk.py         requests on their way to the model, and what has come back of them
    leader.py       the model's loop: texts begin, go on, are dropped and read once more, on all ranks alike
    page.py         the page
    answers.py      which request gets which answer
    front.py        connections, and the two threads put together
    command.py      python -m megatron.serve

Two threads: the model's (the main one), which does nothing but steps of the generator, and one event loop for all
clients. Between them go leader.py's records and nothing else.
"""
