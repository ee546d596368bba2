"""`python -m megatron.plan`."""

from megatron.commands import plan

if __name__ == "__main__":
    raise SystemExit(plan())
