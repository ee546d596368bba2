"""`python -m megatron.tune`: command.py, unless a package of ours is hidden."""

import sys

from megatron.launch.leaving import end_when_asked

if __name__ == "__main__":
    end_when_asked()  # before the rest, which takes a while

from megatron.launch.exits import run
from megatron.neighbours import check_neighbours


def main() -> int:
    check_neighbours()
    from megatron.tune.command import main
    return main()


if __name__ == "__main__":
    sys.exit(run(main))
