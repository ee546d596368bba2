"""`python -m megatron.launch`: command.py."""

import sys

from megatron.launch.leaving import end_when_asked

if __name__ == "__main__":
    end_when_asked("a rank was started")  # before the rest is imported
    from megatron.launch.command import main
    sys.exit(main(sys.argv[1:]))
