"""`python -m megatron.serve`."""

from megatron.commands import serve

if __name__ == "__main__":
    raise SystemExit(serve())
