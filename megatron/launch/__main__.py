"""`python -m megatron.launch`: command.py."""

import sys

from megatron.launch.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
