"""`python -m megatron.tune`."""

from megatron.commands import tune

if __name__ == "__main__":
    raise SystemExit(tune())
