"""`python -m megatron.report`: cli.py, unless a package of ours is hidden."""

import sys

from megatron.distributed.signals import exit_on_stop_signal

if __name__ == "__main__":
    exit_on_stop_signal()  # before the rest, which takes a while

from megatron.distributed.exit_codes import run
from megatron.package import check_package_shadowing


def main() -> int:
    check_package_shadowing()
    from megatron.report.cli import main
    return main()


if __name__ == "__main__":
    sys.exit(run(main))
