"""Metrics of a training run: what is measured in a step, and where it is written.

    step_metrics.py     the metrics of one step
    console.py          console lines and the progress bar
    scalar_writers.py   append-only files, TensorBoard event files, Weights & Biases runs
    run_loggers.py      the trainer's loggers: TensorBoard, CSV, Weights & Biases

The engine's monitor, configured in a DeepSpeed JSON, is megatron/zero/api/engine_monitor.py.
"""
