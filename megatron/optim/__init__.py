"""Optimizers over flat parameter shards, learning rate schedules and the loss scale.

Begin with rule.py (`UpdateRule`, the interface between optimizer and engine) and adam.py; torch_rule.py makes a rule
from the configuration or from an optimizer of torch. schedulers.py has the schedules, and DeepSpeed's classes.
"""
