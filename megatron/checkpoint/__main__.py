"""`python -m megatron.checkpoint`: command.py."""

import sys

from megatron.checkpoint.command import main
from megatron.launch.exits import run

if __name__ == "__main__":
    sys.exit(run(lambda: main(sys.argv[1:])))
