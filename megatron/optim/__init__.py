"""Optimizers over flat parameter shards, learning rate schedules and the loss scale.

Begin with rule.py (`UpdateRule`, the interface between optimizer and engine) and adam.py; build.py makes a rule from
the configuration, torch_rule.py one from an optimizer of torch. schedulers.py has the schedules, and DeepSpeed's
classes.
"""
