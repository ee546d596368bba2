"""Memory, traffic and time of a run from its configuration alone; nothing is built and no rank is started.

Start at footprint.py (persistent memory, traffic) and memory.py (the peak); alternatives.py lists cheaper
configurations, roofline.py predicts the time of a step, cli.py is `python -m megatron.plan` and prints.
"""
