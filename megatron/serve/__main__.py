"""`python -m megatron.serve`: command.py, unless a package of ours is hidden."""

import sys

from megatron.launch.leaving import exit_on_stop_signal

if __name__ == "__main__":
    exit_on_stop_signal()  # before the rest, which takes a while

from megatron.launch.exits import run
from megatron.neighbours import check_package_shadowing


def main() -> int:
    check_package_shadowing()
    from megatron.serve.command import main
    return main()


if __name__ == "__main__":
    sys.exit(run(main))
