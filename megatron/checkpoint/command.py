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
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from data.storage import escape_to_one_line
from megatron.checkpoint.choice import all_tags, candidates, dangling, explain_choice, latest_tag, locate, unreadable
from megatron.checkpoint.lineage import SaveRecord
from megatron.checkpoint.manifest import LATEST, Manifest
from megatron.checkpoint.recognise import nothing_under, recognise
from megatron.checkpoint.tags import check_sizes, complete, held, tag_names, verify
from megatron.config.help import CommandParser
from megatron.config.save import refuse_key
from megatron.errors import EXIT_STORAGE, CheckpointError, TrainerError, exit_code

if TYPE_CHECKING:
    from megatron.checkpoint.reader import Checkpoint


def list_tags(root: Path, tag: str | None) -> None:
    """One line per complete tag, by step: name, iteration, layout, bytes and the tag it was saved after. `latest` marks
    the one that a load uses, `other branch` those that are neither its ancestors nor its descendants, `damaged` those
    with a file that is missing or of another size. A warning for each that is damaged or cannot be read; an error where
    that is the one."""
    manifests = complete(root)
    records = {manifest.tag: manifest.record for manifest in manifests}
    manifests = manifests if tag is None else [check_sizes(root, held(root, tag))]
    if not manifests and recognise(root):  # its tags are not ours, and not damaged
        raise CheckpointError(nothing_under(root))
    damaged = unreadable(root, check_sizes) if tag is None else {}
    latest = latest_tag(root)
    chosen, *others = candidates(root) if manifests or latest is not None else [""]
    for manifest in manifests:
        print(_line(manifest) + _descent(manifest.record, records, records.get(chosen))
              + "  damaged" * (manifest.tag in damaged) + "  latest" * (manifest.tag == latest))
    sys.stdout.flush()
    listed = [manifest.tag for manifest in manifests]
    for name, error in damaged.items():
        print(f"warning: {escape_to_one_line(error)}" + "  latest" * (name == latest and name not in listed),
              file=sys.stderr)
    if tag is not None:
        return
    if not chosen:
        raise CheckpointError(nothing_under(root) + dangling(root))
    if chosen in damaged:
        good = [name for name in (*others, *reversed(listed)) if name not in damaged]
        advice = "no tag here is complete" if not good else (
            f"name another tag ({root}:{good[0]}), which `{MODULE} verify` checks to the last byte, or put a copy of "
            f"{chosen} in its place")
        raise CheckpointError(f"{root / LATEST} {'names' if latest else 'names no tag, and the newest is'} {chosen}, "
                              f"which cannot be read: a load of {root} ends with this error too; {advice}")
    if latest is None and (warning := explain_choice(root, chosen)):
        print(escape_to_one_line(warning), file=sys.stderr)


def _line(manifest: Manifest) -> str:
    layout = " ".join(f"{key}={value}" for key, value in manifest.layout.items())
    return escape_to_one_line(f"{manifest.tag}  iteration {manifest.iteration}  {layout}  {_bytes(manifest)} bytes")


def _descent(record: SaveRecord, records: Mapping[str, SaveRecord], used: SaveRecord | None) -> str:
    """The tag that it was saved after, and whether the one that a load uses is of another branch."""
    text = ""
    if record.history:
        parent = record.history[-1]
        there = parent.tag in records and records[parent.tag].as_ancestor == parent
        text = f"  after {parent.tag}" + ("" if there else " (deleted or replaced)")
    is_other = used is not None and not used.continues(record) and not record.continues(used)
    return text + ("  other branch" if is_other else "")


def _bytes(manifest: Manifest) -> int:
    return manifest.nbytes if manifest.has_parts else sum(entry.size for entry in manifest.files.values())


def verify_tags(root: Path, tag: str | None) -> None:
    """Check every tag, then fail with the first that is damaged."""
    damaged: list[CheckpointError] = []
    names = [held(root, tag)] if tag is not None else list(dict.fromkeys([*all_tags(root), *unreadable(root)]))
    for name in names:
        try:
            manifest = verify(root, name)
            print(f"{name}: ok, {len(manifest.files)} files, {_bytes(manifest)} bytes", flush=True)
        except CheckpointError as error:
            damaged.append(error)
    if damaged:
        more = f" (and {len(damaged) - 1} more damaged tags)" if len(damaged) > 1 else ""
        raise CheckpointError(f"{damaged[0]}{more}")


def print_digest(root: Path, tag: str | None) -> None:
    from megatron.checkpoint.export import digest
    from megatron.checkpoint.reader import open_checkpoint

    for line in digest(open_checkpoint(root, tag, int8=True)):
        print(line, flush=True)


def merge_weights(root: Path, tag: str | None, output: Path) -> None:
    from megatron.checkpoint.export import merge
    from megatron.checkpoint.reader import open_checkpoint

    checkpoint = open_checkpoint(root, tag)
    _tell_of_masters(checkpoint)
    print(f"{output}: weights of {checkpoint.tag} as fp32, {merge(checkpoint, output)} bytes")


def convert(source: Path, tag: str | None, chosen: argparse.Namespace) -> None:
    """To or from another program's files; with --dtype int8 from either to int8 weights."""
    from megatron.checkpoint.interchange.convert import import_weights, open_foreign, quantise_weights
    from megatron.checkpoint.interchange.huggingface import export
    from megatron.checkpoint.reader import open_checkpoint

    output = chosen.output
    if tag is not None or tag_names(source):
        checkpoint = open_checkpoint(source, tag)
        _tell_of_masters(checkpoint)
        if chosen.dtype is None:
            for path in export(checkpoint, output, say=lambda line: print(f"note: {line}")):
                print(f"{path}: {path.stat().st_size} bytes")
            return
        report = quantise_weights(checkpoint, output)
    else:
        found = open_foreign(source, chosen.vocab_size, chosen.num_attention_heads, chosen.checkpoint_version)
        if chosen.dtype is None:
            for note in found.notes:
                print(f"note: {found.where}: {note}")
            report, shape = import_weights(found, output), found.model
            print(f"{output}: {report.tag} with {found.parameters} parameters: --num-layers {shape.num_layers} "
                  f"--hidden-size {shape.hidden_size} --num-attention-heads {shape.num_attention_heads} "
                  f"--intermediate-size {shape.ffn_size} --max-position-embeddings {shape.max_position_embeddings} "
                  f"--vocab-size {shape.vocab_size} --layernorm-epsilon {shape.layernorm_epsilon:g} --load {output} "
                  "--finetune")
            return
        report = quantise_weights(found, output)
    print(f"{output}: {report.tag} with int8 weights, {report.bytes} bytes")


def _tell_of_masters(found: Checkpoint) -> None:
    """What is written is not what a run had at work that rounds its weights."""
    if "quantisation" in found.shared_state.get("engine", {}):
        print(f"note: {found.tag} was quantised in training, and these are its exact masters: megatron.generate, "
              "evaluate and serve load the weights that it had at work, with --dtype int8 on its own grid")


MODULE = "python -m megatron.checkpoint"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = CommandParser(MODULE, __doc__ or "")
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
    parser.add_argument("--checkpoint-key", type=refuse_key, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if (chosen.command in ("merge", "convert")) != (chosen.output is not None):
        parser.error("--output PATH belongs to merge and convert, and they need it")
    if chosen.dtype is not None and chosen.command != "convert":
        parser.error("--dtype belongs to convert")
    root, tag = locate(chosen.dir)
    if tag is not None and chosen.tag not in (None, tag):
        parser.error(f"{chosen.dir} is tag {tag}, and --tag says {chosen.tag}")
    chosen.dir, chosen.tag = root, chosen.tag if tag is None else tag
    return chosen


def run(arguments: list[str]) -> None:
    chosen = parse(arguments)
    if chosen.command == "merge":
        merge_weights(chosen.dir, chosen.tag, chosen.output)
    elif chosen.command == "convert":
        convert(chosen.dir, chosen.tag, chosen)
    elif chosen.command == "list":
        list_tags(chosen.dir, chosen.tag)
    else:
        (verify_tags if chosen.command == "verify" else print_digest)(chosen.dir, chosen.tag)


def main(arguments: list[str]) -> int:
    try:
        run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        raise  # launch/exits.py ends a command whose reader has seen enough
    except (TrainerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_code(error) or EXIT_STORAGE
    return 0
