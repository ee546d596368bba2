"""The launcher: `python -m megatron.launch` starts the ranks of a node, watches them and names the rank that failed.

Begin with launcher.py (options, environment), then supervisor.py (one node) and rendezvous.py, node_monitor.py
(several). Standard library only. What the ranks themselves use is in megatron/distributed.
"""
