"""Metrics of a training run: what is measured in a step, and where it is written.

    step_metrics.py   the metrics of one step
    sinks.py          JSON lines, CSV, TensorBoard, Weights & Biases

The trainer's log (train/run_log.py, with the console) and the engine's monitor (zero/api/engine_features.py) write to
the same sinks.
"""
