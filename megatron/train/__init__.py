"""The training program: the loop, and what it reads and writes.

build.py (configuration -> the parts of a run), batches.py (samples -> micro-batches), loop.py (the loop),
evaluation.py, metrics.py and flops.py (what a run reports), resume.py (its state <-> a checkpoint), sample.py (text at
the end), allocator.py and processor.py (what a CPU run should know about its machine).
"""

from megatron.neighbours import check_neighbours

check_neighbours()
