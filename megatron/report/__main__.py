"""`python -m megatron.report`."""

from megatron.commands import report

if __name__ == "__main__":
    raise SystemExit(report())
