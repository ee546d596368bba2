"""DeepSpeed's API over the ZeRO engine: what a training script calls.

    initialize.py         `zero.initialize`, `zero.init_distributed`
    init.py               `zero.Init`, `zero.GatheredParameters`
    engine.py             `Engine`; engine_status.py: its read-only part; engine_features.py: progressive layer drop,
                          eigenvalues, the flops profile
    optimizer.py          the optimizer and learning rate scheduler; data_loader.py: batch sizes and data loader
    checkpoint_io.py      saving and loading; checkpoint_state.py: hyper-parameters, validation, error feedback
    module_state_dict.py  the model's weights as a state dict
    engine_monitor.py     console lines and scalars as DeepSpeed's JSON asks for them
    offload_plan.py       where state is stored and on which side it is updated
    model_checks.py       which models an engine accepts
    compat_names.py       DeepSpeed's further engine names
"""
