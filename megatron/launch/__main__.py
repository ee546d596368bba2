"""`python -m megatron.launch`: launcher.py."""

import sys

from megatron.distributed.signals import exit_on_stop_signal

if __name__ == "__main__":
    exit_on_stop_signal("a rank was started")  # before the rest is imported
    from megatron.launch.launcher import main
    sys.exit(main(sys.argv[1:]))
