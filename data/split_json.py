"""Split JSONL into training, validation and test files: `python -m data.split_json FILE --split 949,50,1
--output-prefix P`.

A hash of its text decides the part of a document, independent of other documents, file order and machine, and equal
texts are in the same part. So shares are only approximate: 1 % of 10,000 documents is 100 +- 20. Lines are copied byte
for byte.
"""

from __future__ import annotations

import hashlib
import os
import sys
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from fractions import Fraction
from itertools import accumulate
from pathlib import Path

from data.cli import StrictArgumentParser, run_command
from data.input_files import check_stage_shards, find_text_files
from data.sampling import PARTS, parse_split
from data.storage import (DataError, UsageError, change_detector, check_outputs_are_not_inputs, escape_to_one_line,
                          hold_writer_lock, make_folder, staged_file, write_errors_for)
from data.text_files import parse_lines, read_line_chunks


def part_of_text(text: str, ends: Sequence[int], seed: int) -> int:
    """The part of a text: the first whose end, in units of 2^-64, is above its hash."""
    digest = hashlib.blake2b(f"{seed} {text}".encode(), digest_size=8).digest()
    return bisect_right(ends, int.from_bytes(digest, "big"))


def split_json(inputs: Iterable[str], prefix: str, shares: Sequence[Fraction], *, key: str = "text", seed: int = 0,
               skip_malformed: bool = False) -> tuple[dict[str, int], int]:
    """Write `PREFIX.<part>.jsonl` for each share above 0; returns (documents per part, skipped lines)."""
    inputs = list(inputs)
    check_outputs_are_not_inputs(inputs, [f"{prefix}.{name}.jsonl" for name in PARTS], "choose another --output-prefix")
    make_folder(Path(prefix).parent)
    ends = [int(end * 2**64) for end in accumulate(shares)]
    check_unchanged = change_detector(inputs)
    check_stage_shards(inputs)
    counts = {name: 0 for name, share in zip(PARTS, shares) if share}
    if others := [path for name in PARTS if name not in counts and os.path.lexists(path := f"{prefix}.{name}.jsonl")]:
        raise UsageError(f"--split has nothing for {' and '.join(others)}, left by another split of perhaps the same "
                         "documents: remove it, or choose another --output-prefix")
    skipped = 0
    paths = {name: f"{prefix}.{name}.jsonl" for name in counts}
    with ExitStack() as stack:  # all files appear together at the end
        stack.enter_context(hold_writer_lock(f"{prefix}.jsonl"))
        files = {name: stack.enter_context(staged_file(path)) for name, path in paths.items()}
        for chunk in (chunk for path in inputs for chunk in read_line_chunks(path)):
            for line, text in parse_lines(chunk, key):
                if isinstance(text, str):
                    name = PARTS[part_of_text(text, ends, seed)]
                    files[name].write(line + b"\n")
                    counts[name] += 1
                elif skip_malformed:
                    skipped += 1
                else:
                    raise text.to_error()
            if chunk.damage:
                if not skip_malformed:
                    raise DataError(chunk.damage)
                skipped += 1
                print(f"skipped the rest of a file: {escape_to_one_line(chunk.damage)}", file=sys.stderr)
        check_unchanged()
        with write_errors_for(prefix):
            for file in files.values():  # a full disk fails here, before the old files are removed
                file.flush()
                os.fsync(file.fileno())
            for path in paths.values():  # so that a crash between two renames leaves no mixture of old and new
                Path(os.path.realpath(path)).unlink(missing_ok=True)
    return counts, skipped


def main(argv: Sequence[str] | None = None) -> None:
    parser = StrictArgumentParser("data.split_json",
                                  "Split JSONL files into P.train.jsonl, P.valid.jsonl and P.test.jsonl.")
    parser.add_argument("input", nargs="+", metavar="FILE",
                        help="JSONL files, plain or compressed (.gz, .xz, .zst), or folders of them")
    parser.add_argument("--split", default="949,50,1", help="shares of the three (default: 949,50,1)")
    parser.add_argument("--output-prefix", required=True, metavar="P")
    parser.add_argument("--json-key", default="text", help="which key holds the text (default: text)")
    parser.add_argument("--seed", type=int, default=0, metavar="N",
                        help="another seed draws other lots; a part that is split again needs one")
    parser.add_argument("--on-error", choices=("strict", "skip"), default="strict", help="what a malformed line does")
    args = parser.parse_args(argv)
    found = find_text_files(args.input, (".jsonl", ".ndjson"))
    if found.left_out:
        print(found.left_out, file=sys.stderr)
    counts, skipped = split_json(
        found.files, args.output_prefix, parse_split(args.split), key=args.json_key, seed=args.seed,
        skip_malformed=args.on_error == "skip")
    parts = ", ".join(f"{count} in {args.output_prefix}.{name}.jsonl" for name, count in counts.items())
    print(f"{sum(counts.values())} documents: {parts}; {skipped} malformed lines skipped")


if __name__ == "__main__":
    run_command(main)
