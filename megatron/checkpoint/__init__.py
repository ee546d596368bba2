"""Checkpoints: pieces of logical tensors and a manifest, readable by any layout; no pickle anywhere.

Read in this order. Those before agree.py need no torch, so `list` and `verify` do not either.

    strict.py      JSON records whose every field is expected: a missing or unknown one is a CheckpointError
    cut.py         local index <-> logical index under any tensor-parallel cut, and which shard holds an element
    lineage.py     from which saves a save continues
    manifest.py    what a checkpoint is: logical tensors and how they are cut
    part.py        what one rank says about its own files: sizes, checksums, and which checkpoint a file is of
    header.py      what is in a safetensors file, and where
    recognise.py   what a folder of another program is, and which command reads it
    strangers.py   links that lead out of a save root, and files that no save wrote
    tags.py        which checkpoints there are under a folder, and are they intact
    choice.py      which of them a load uses: the one named by the user or by `latest`, or the newest
    flock.py       which folder a save holds, and one save at a time commits
    trash.py       how one is deleted: out of the way first, then taken apart while training goes on
    commit.py      how a folder becomes a checkpoint, atomically; what a kill leaves behind; one job at a time
    agree.py       all ranks succeed, or all raise the same error
    tensorfile.py  safetensors files, written piece by piece and read by position
    state.py       nested dicts of JSON values and tensors (random streams, schedules)
    piece.py       what the engine hands over: consecutive elements of one parameter's state
    int8.py        weights of 8 bits: the rule
    writer.py      save: every rank its own pieces, one commit
    background.py  save while training goes on
    reader.py      open and read, whatever layout wrote it
    export.py      layout-free digests, one-file fp32 export
    command.py     python -m megatron.checkpoint list|verify|digest|merge|convert

interchange/ is about the checkpoints of other programs, and ours for them.

This file imports none of them, so that the torch-free half stays torch-free: import from the modules.
"""

import sys

from megatron.neighbours import check_package_shadowing

# `python -m megatron.checkpoint` imports this file before it can report anything; __main__.py checks in its place.
if not (sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)].removeprefix("-m").startswith("megatron.checkpoint")):
    check_package_shadowing()
