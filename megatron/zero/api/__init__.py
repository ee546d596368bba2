"""DeepSpeed's names over the mechanism: what a training script calls.

    initialize.py   `zero.initialize`; meeting.py: `zero.init_distributed`
    taking.py       which models an engine may take, and what is left of one where that fails
    offload.py      where its state lives; update.py: where it is updated; drives.py: folders on drives
    engine.py       `Engine`, what it returns; status.py: what it says of itself; names.py: DeepSpeed's further names
    optimizer.py, schedule.py, loading.py    the optimizer, the scheduler and the loader beside it
    batching.py, monitor.py                  batch sizes, what is reported
    lines.py        lines appended to a file, whatever a kill has left of it
    curves.py       tensorboard's writer, whose errors name the flag; wandb_run.py: a run of Weights & Biases
    weights.py, saved.py                     the weights as a state dict; the engine's state in a checkpoint
    layer_drop.py   theta of progressive layer dropping, handed to the model
    owed.py                                  what ranks owe each other there, with 1-bit optimizers
    profiled.py     the step that the flops profiler looks at
    eigenvalues.py  of blocks whose weights are about to have fewer bits
    shared.py                                what the state in a checkpoint must be to be used
    hyper.py        the hyper-parameters of the param groups there; same.py: whether all ranks have the same model
    init.py         `zero.Init`, `zero.GatheredParameters`; meanwhile.py: where parameters wait for `zero.initialize`
"""
