"""What every rank of a job uses around training: process group, rank status, signals, exit codes, consistency checks.

Begin with process_group.py. Only consistency.py, collective_log.py and watchdog.py import torch at import time. This
file imports nothing: commands import signals.py before anything slow.
"""
