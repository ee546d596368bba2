"""The fastest settings of a machine for a model and a batch: `python -m megatron.tune TRAINING FLAGS`.

    space.py      what can be tried, as runs that the planner knows
    memory.py     what a choice needs on the device and on the host
    model.py      what its predictions are wrong by, from the trials so far
    search.py     what is left out, what is tried next, and when it is enough
    words.py      a configuration -> the flags that make it
    patience.py   how long a trial is waited for
    trial.py      a few real steps in processes of their own; whatever becomes of them is a result
    subject.py    what trials belong to: the run, the machine
    results.py    trials on disk: a search that was killed goes on
    report.py     a table, the flags to type, a page
    capacity.py   the memory that there is
    loop.py       one trial after the other
    command.py    `python -m megatron.tune`

Not here: the memory and the time of a choice (megatron/plan). No torch.
"""
