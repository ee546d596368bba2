"""`python -m megatron.checkpoint`: cli.py, after a check that no installed package shadows ours."""

import sys

from megatron.distributed.signals import exit_on_stop_signal

if __name__ == "__main__":
    exit_on_stop_signal()  # before the slow imports below

from megatron.distributed.exit_codes import run
from megatron.package import check_package_shadowing


def main() -> int:
    check_package_shadowing()
    from megatron.checkpoint.cli import main
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run(main))
