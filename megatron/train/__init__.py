"""The training program: the loop, and what it reads and writes.

    inputs.py       is it there, the text that is named; torch-free
    build.py        configuration -> the parts of a run; facts.py: what these amount to, for people
    compiling.py    what of the model is compiled, and the precision of fp32 products
    batches.py      samples -> micro-batches
    loop.py         the loop; evaluation.py: loss on held-out text; rate.py: is a learning rate left; garbage.py: when
                    Python looks for garbage
    log.py          what a run reports: metrics.py (numbers), console.py, board.py (tensorboard), table.py (CSV),
                    dashboard.py (Weights & Biases), flops.py
    resume.py       the state of a run <-> a checkpoint
    sample.py       text from the model at the end
    allocator.py, processor.py    what a CPU run should know about its machine
"""

from megatron.neighbours import check_package_shadowing

check_package_shadowing()
