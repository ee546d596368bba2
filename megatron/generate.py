"""`python -m megatron.generate`."""

from megatron.commands import generate

if __name__ == "__main__":
    raise SystemExit(generate())
