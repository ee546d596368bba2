"""`python -m megatron.checkpoint`."""

from megatron.commands import checkpoint

if __name__ == "__main__":
    raise SystemExit(checkpoint())
