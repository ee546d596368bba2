"""`python -m megatron.report`: run_report.py."""

import sys

from megatron.distributed.signals import exit_on_stop_signal

if __name__ == "__main__":
    exit_on_stop_signal()  # before the imports below, which take a while
    from megatron.distributed.exit_codes import run_command
    sys.exit(run_command("megatron.report.run_report"))
