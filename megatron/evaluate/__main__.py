"""`python -m megatron.evaluate`."""

from megatron.commands import evaluate

if __name__ == "__main__":
    raise SystemExit(evaluate())
