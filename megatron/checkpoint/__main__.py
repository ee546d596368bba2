"""`python -m megatron.checkpoint`: command.py."""

import sys

from megatron.checkpoint.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
