"""A trained model behind HTTP: Megatron's `/api`, OpenAI's `/v1/completions`, and a page to try it.

    limits.py       how much may be asked for, and how long a client may take
    refusal.py      why something is not answered: a status, a message, the name of what is wrong
    message.py      a request as it comes over the wire, read strictly; a response as it goes
    door.py         who may ask: keys, and names of this host
    fields.py       the JSON object of a request, key by key
    asked.py        what both dialects ask for, without their words
    megatron_api.py, completions.py     the dialects
    metrics.py      what is counted
    orders.py       what is said between the model's thread and that of the clients
    desk.py         requests on their way to the model, and what has come back of them
    judge.py        how likely each token of a text is, by reading it once more
    leader.py       the model's loop: texts begin, go on and are dropped, on all ranks alike
    page.py         the page
    exchange.py     a connection: a request, a response
    answers.py      which request gets which answer
    front.py        connections
    service.py      the two threads, put together
    command.py      python -m megatron.serve

Two threads: the model's (the main one), which does nothing but steps of the generator, and one event loop for all
clients. Between them go `orders.py`'s records and nothing else.
"""
