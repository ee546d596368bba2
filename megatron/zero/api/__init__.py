"""DeepSpeed's names over the mechanism: what a training script calls.

    initialize.py   `zero.initialize`, `zero.init_distributed`
    same.py         which models an engine may take, and what is left of one where that fails
    offload.py      where its state lives, and its folders on drives; update.py: where it is updated
    engine.py       `Engine`, what it returns; status.py: what it says of itself; names.py: DeepSpeed's further names
    schedule.py     the optimizer and scheduler; batching.py: batch sizes and the loader; monitor.py: what is reported
    lines.py        lines appended to a file, whatever a kill has left of it
    curves.py       tensorboard's writer, whose errors name the flag; wandb_run.py: a run of Weights & Biases
    weights.py, saved.py   the weights as a state dict; the engine's state in a checkpoint, in which shared.py checks
                    what all ranks read, hyper.py has hyper-parameters, owed.py what ranks owe with 1-bit optimizers
    layer_drop.py   theta of progressive layer dropping, handed to the model
    profiled.py     the step that the flops profiler looks at
    eigenvalues.py  of blocks whose weights are about to have fewer bits
    init.py         `zero.Init`, `zero.GatheredParameters`
"""
