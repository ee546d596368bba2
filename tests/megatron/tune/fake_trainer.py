"""What trials start in the place of the trainer: does what FAKE_TRAINER says, and writes the metrics of its steps."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    way, words = os.environ["FAKE_TRAINER"], sys.argv[1:]
    stage = words[words.index("--zero-stage") + 1] if "--zero-stage" in words else "0"
    if way == "memory":
        print("error: rank 0 is out of memory: can't allocate memory; try --batch-size 1", file=sys.stderr)
        sys.exit(5)
    if way == "limit":
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (2**28, 2**28))
        bytearray(2**29)
    if way == "hang":
        time.sleep(600)

    if way == "silent":
        sys.exit(0)
    if way == "crash":
        raise AssertionError("what nobody has thought of")
    if os.environ.get("RANK", "0") == "0":
        batch = int(words[words.index("--batch-size") + 1]) if "--batch-size" in words else 1
        steps = int(words[words.index("--exit-interval") + 1])
        records = [{"iteration": step, "step_ms": 1e6 if step < 3 else 100.0 + 10 * int(stage) + batch}
                   for step in range(1, steps + 1)]
        text = "".join(f"{json.dumps(one)}\n" for one in records)
        Path(words[words.index("--metrics-file") + 1]).write_text(text[:-20] if way == "cut" else text)
    if way == "cut":
        raise AssertionError("killed while it wrote a line")


if __name__ == "__main__":
    main()
