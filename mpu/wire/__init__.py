"""How numbers travel between the ranks of a group: wires behind one interface (mpu/collectives.py chooses).

    interface.py    what a wire can do, and what it returns: an operation under way
    native.py       a backend's own operations: for accelerators
    gloo.py         for the CPU: broadcasts, and sends with a sum taken here in rank order
    functional.py   torch's functional collectives: a new tensor from an old one, inside autograd and compiled code
    control.py      words rather than tensors: JSON, flags, errors, barriers
    waits.py        whether this process is in an exchange, for who looks from outside
    board.py        notes that ranks leave for each other without meeting
    abort.py        how gloo ends a process, and how to be faster

Nothing but these files names an operation of torch.distributed. Groups of one never come here.
"""
