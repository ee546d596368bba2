"""`python -m megatron.launch`."""

from megatron.commands import launch

if __name__ == "__main__":
    raise SystemExit(launch())
