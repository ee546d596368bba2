"""What every rank of a job uses around training: joining and leaving the process group, its reported status, signals and
exit codes, and checks that all ranks agree.

Begin with process_group.py. Only consistency.py, collective_log.py and watchdog.py import torch at import time. This file
imports nothing: commands import signals.py before anything slow.
"""
