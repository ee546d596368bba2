"""Checkpoints: pieces of logical tensors and a manifest, readable under any parallel layout; no pickle.

Begin with manifest.py (what a checkpoint is), then writer.py and commit.py (save), tags.py, verify.py and reader.py
(load). convert/ reads and writes other programs' checkpoints. file_formats, manifest, tags, verify and commit need no
torch, so `list` and `verify` do not; hence this file imports none of the modules.
"""

import sys

from megatron.package import check_package_shadowing

# `python -m megatron.checkpoint` imports this file before it can report anything; __main__.py checks in its place.
if not (sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)].removeprefix("-m").startswith("megatron.checkpoint")):
    check_package_shadowing()
