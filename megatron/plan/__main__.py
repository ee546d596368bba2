"""`python -m megatron.plan`: command.py."""

import sys

from megatron.launch.exits import run
from megatron.plan.command import main

if __name__ == "__main__":
    sys.exit(run(main))
