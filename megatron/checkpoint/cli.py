"""python -m megatron.checkpoint list|verify|digest|merge|convert DIR[:TAG] [--tag TAG]

DIR is a save root, or the folder of one tag. Without a tag `list` and `verify` cover all of them, and the others the
one that a load uses: what `latest` names, otherwise the newest.
`convert` writes a Hugging Face GPT-2 folder; where DIR is such a folder, nanoGPT's ckpt.pt, Megatron-LM's folder of
mp_rank_XX or one state dict of such a model, it writes a save root of ours (start from it with --load OUTPUT
--finetune). With `--dtype int8` it writes any of these as a save root of ours with int8 weights, for
`python -m megatron.generate --load OUTPUT`.
`list` and `verify` import no torch. Exit codes: 0 good, 2 usage, 4 damaged or no checkpoint, 7 output not writable.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from data.storage import escape_to_one_line
from megatron.checkpoint.manifest import LATEST, Manifest
from megatron.checkpoint.tags import (check_latest_inside, check_tag_exists, choose_tag, dangling, describe_format,
                                      latest_tag, no_checkpoint_message, parse_checkpoint_path, print_to_stderr,
                                      scan_tags, tag_names)
from megatron.checkpoint.verify import check_sizes, verify_tag
from megatron.config.cli_help import command_parser
from megatron.errors import EXIT_STORAGE, CheckpointError, TrainerError, exit_code

if TYPE_CHECKING:
    from megatron.checkpoint.reader import Checkpoint


def list_tags(root: Path, tag: str | None) -> None:
    """Print one line per complete tag, by step: name, iteration, layout, bytes and parent tag. `latest` marks the tag
    that a load uses, `other branch` tags that are neither its ancestors nor its descendants, `damaged` tags with a
    missing file or one of the wrong size. Warns for each damaged or unreadable tag; raises if that is the tag a load
    uses."""
    latest = latest_tag(root)
    manifests = {name: manifest for name, manifest in scan_tags(root).items() if isinstance(manifest, Manifest)}
    records = manifests
    if not manifests and describe_format(root):  # another program's checkpoint, not a damaged one
        raise CheckpointError(no_checkpoint_message(root))
    if tag is not None:
        manifests = {tag: check_sizes(root, check_tag_exists(root, tag))}
    damaged = {} if tag is not None else {name: error for name, error in scan_tags(root, check_sizes).items()
                                          if isinstance(error, CheckpointError)}
    choice = choose_tag(root) if manifests or latest is not None else None
    used = records.get(choice.first) if choice is not None else None
    for name, manifest in manifests.items():
        print(_tag_text(manifest, records, used) + "  damaged" * (name in damaged) + "  latest" * (name == latest))
    sys.stdout.flush()
    for name, error in damaged.items():
        print(f"warning: {escape_to_one_line(error)}" + "  latest" * (name == latest and name not in manifests),
              file=sys.stderr)
    if tag is not None:
        return
    if choice is None:
        raise CheckpointError(no_checkpoint_message(root) + dangling(root))
    chosen = choice.first
    if chosen in damaged:
        good = [name for name in (*choice.fallbacks, *reversed(manifests)) if name not in damaged]
        advice = "no tag here is complete" if not good else (
            f"name another tag ({root}:{good[0]}), which `{COMMAND} verify` checks to the last byte, or put a copy of "
            f"{chosen} in its place")
        raise CheckpointError(f"{root / LATEST} {'names' if latest else 'names no tag, and the newest is'} {chosen}, "
                              f"which cannot be read: a load of {root} ends with this error too; {advice}")
    if latest is None and choice.warning:
        print_to_stderr(choice.warning)


def _tag_text(record: Manifest, records: Mapping[str, Manifest], used: Manifest | None) -> str:
    """Content, parent tag, and whether the tag is on another branch than `used`, which a load uses."""
    layout = " ".join(f"{key}={value}" for key, value in record.layout.items())
    text = escape_to_one_line(f"{record.tag}  iteration {record.iteration}  {layout}  {record.nbytes} bytes")
    if record.history:
        parent = record.history[-1]
        saved = records.get(parent.tag)
        there = saved is not None and (saved.branch, saved.commit) == (parent.branch, parent.commit)
        text += f"  after {parent.tag}" + ("" if there else " (not in this folder)")
    is_other = used is not None and not used.descends_from(record) and not record.descends_from(used)
    return text + ("  other branch" if is_other else "")


def verify_tags(root: Path, tag: str | None) -> None:
    """Check every tag, then raise for the first damaged one."""
    damaged: list[CheckpointError] = []
    if tag is None:
        check_latest_inside(root)
    names = list(scan_tags(root)) if tag is None else [check_tag_exists(root, tag)]
    if not names:
        raise CheckpointError(no_checkpoint_message(root) + dangling(root))
    for name in names:
        try:
            manifest, files = verify_tag(root, name)
            print(f"{name}: ok, {len(files)} files, {manifest.nbytes} bytes", flush=True)
        except CheckpointError as error:
            damaged.append(error)
    if damaged:
        more = f" (and {len(damaged) - 1} more damaged tags)" if len(damaged) > 1 else ""
        raise CheckpointError(f"{damaged[0]}{more}")


def convert(source: Path, tag: str | None, options: argparse.Namespace) -> None:
    """Convert to or from another program's checkpoint, or with --dtype int8 from either to int8 weights."""
    from megatron.checkpoint.convert.export_huggingface import export_huggingface
    from megatron.checkpoint.convert.external_checkpoint import ExternalCheckpoint, save_weights
    from megatron.checkpoint.convert.importers import open_external_checkpoint
    from megatron.checkpoint.reader import open_checkpoint

    output = options.output
    found: Checkpoint | ExternalCheckpoint
    if tag is not None or tag_names(source):
        found = open_checkpoint(source, tag)
        _print_quantised_note(found)
    else:
        found = open_external_checkpoint(source, options.vocab_size, options.num_attention_heads,
                                         options.checkpoint_version)
    if options.dtype is not None:
        report = save_weights(found, output, quantise=True)
        print(f"{output}: {report.tag} with int8 weights, {report.bytes} bytes")
    elif isinstance(found, ExternalCheckpoint):
        for note in found.notes:
            print(f"note: {found.where}: {note}")
        report, shape = save_weights(found, output), found.model
        parameters = sum(map(prod, found.shapes.values()))
        print(f"{output}: {report.tag} with {parameters} parameters: --num-layers {shape.num_layers} "
              f"--hidden-size {shape.hidden_size} --num-attention-heads {shape.num_attention_heads} "
              f"--intermediate-size {shape.ffn_size} --max-position-embeddings {shape.max_position_embeddings} "
              f"--vocab-size {shape.vocab_size} --layernorm-epsilon {shape.layernorm_epsilon:g} --load {output} "
              "--finetune")
    else:
        for path in export_huggingface(found, output):
            print(f"{path}: {path.stat().st_size} bytes")


def _print_quantised_note(checkpoint: Checkpoint) -> None:
    """Note that the output holds the exact masters of a run that trained with quantised weights."""
    if "quantisation" in checkpoint.shared_state.get("engine", {}):
        print(f"note: {checkpoint.tag} was quantised in training, and these are its exact masters: megatron.generate, "
              "evaluate and serve load the weights that it had at work, with --dtype int8 on its own grid")


COMMAND = "python -m megatron.checkpoint"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_parser(COMMAND, __doc__ or "")
    parser.add_argument("command", choices=["list", "verify", "digest", "merge", "convert"])
    parser.add_argument("dir", type=Path, metavar="DIR[:TAG]",
                        help="save root, or the folder of one tag; convert: also what another program saved")
    parser.add_argument("--tag", metavar="TAG", help="the same as DIR:TAG")
    parser.add_argument("--output", type=Path, metavar="PATH",
                        help="merge: the safetensors file to write; convert: the folder")
    parser.add_argument("--vocab-size", type=int, metavar="N",
                        help="convert from nanoGPT and Megatron-LM: tokens, without the rows that pad the table")
    parser.add_argument("--num-attention-heads", type=int, metavar="N",
                        help="convert from Megatron-LM: where its file does not say")
    parser.add_argument("--checkpoint-version", type=float, metavar="V",
                        help="convert from one state dict of a Megatron GPT-2: order of its query_key_value (0 to 3)")
    parser.add_argument("--dtype", choices=["int8"], help="convert: int8 weights, for inference alone")
    options = parser.parse_args(arguments)
    if (options.command in ("merge", "convert")) != (options.output is not None):
        parser.error("merge and convert, and no other commands, need --output PATH")
    if options.dtype is not None and options.command != "convert":
        parser.error("--dtype belongs to convert")
    root, tag = parse_checkpoint_path(options.dir)
    if tag is not None and options.tag not in (None, tag):
        parser.error(f"{options.dir} is tag {tag}, and --tag says {options.tag}")
    options.dir, options.tag = root, options.tag if tag is None else tag
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
        if options.command == "list":
            list_tags(options.dir, options.tag)
        elif options.command == "verify":
            verify_tags(options.dir, options.tag)
        elif options.command == "convert":
            convert(options.dir, options.tag, options)
        else:
            from megatron.checkpoint.reader import digest_lines, open_checkpoint, write_fp32_weights

            checkpoint = open_checkpoint(options.dir, options.tag, int8=options.command == "digest")
            if options.command == "digest":
                for line in digest_lines(checkpoint):
                    print(line, flush=True)
            else:
                _print_quantised_note(checkpoint)
                print(f"{options.output}: weights of {checkpoint.tag} as fp32, "
                      f"{write_fp32_weights(checkpoint, options.output)} bytes")
        sys.stdout.flush()
    except BrokenPipeError:
        raise  # exit_codes.py ends a command whose reader has seen enough
    except (TrainerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_code(error) or EXIT_STORAGE
    return 0
