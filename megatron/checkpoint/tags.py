"""Which checkpoints (tags) a save root holds, and which one a load uses. Reads only; no torch.

A tag is a folder with a valid manifest. It gets its name in one rename after its last byte is on disk (commit.py), so a
`global_step<N>` without a valid manifest is damaged, not unfinished.

    DIR:TAG, --ckpt-step N    the tag that was asked for
    DIR                       the tag that the file `latest` names
    DIR without `latest`      the newest tag, with a warning (likewise if `latest` names no tag)

*Newest* means committed last, by the commit number in the manifest, not by step or clock: after going back to step 4,
step 6 of the new branch follows step 8 of the abandoned one. If the chosen tag is damaged, only its ancestors may
replace it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from data.storage import escape_to_one_line
from megatron.checkpoint.file_formats import (check_record, explain_read_errors, parse_json, read_bytes,
                                              unseal_record)
from megatron.checkpoint.manifest import (LATEST, MANIFEST, CommitRecord, Manifest, check_safe_name, is_safe_name,
                                          iteration_of_tag, parse_history, parse_manifest, rank_manifest_name,
                                          rank_of_file, read_manifest_end)
from megatron.errors import CheckpointError

MAX_NAMES = 3  # file names in a message; of further ones it gives the number
ASIDE_PREFIX = ".aside-"  # of a committed tag that was moved aside for its successor of the same name (commit.py)
# What `latest` will name after the commit: `tag`, its manifest's checksum `seal`, and `was`, the content of `latest`
# before. It covers a kill between the commit of a tag and the writing of `latest`.
PENDING_LATEST = ".latest-pending"


def print_to_stderr(line: str) -> None:
    print(escape_to_one_line(line), file=sys.stderr, flush=True)


# Links that lead out of the save root are not followed, read, written or deleted.
def link_target_outside(path: Path, root: Path) -> str | None:
    """Target of a link that leaves the save root; None for anything else."""
    if not path.is_symlink():
        return None
    target, root_path = os.path.realpath(path), os.path.realpath(root)
    return None if os.path.commonpath([target, root_path]) == root_path else target


def check_latest_inside(root: Path) -> None:
    if (target := link_target_outside(root / LATEST, root)) is not None:
        raise CheckpointError(f"{LATEST}: {root / LATEST} is a link to {target}, outside the save root, and is not "
                              "followed; write the name of a tag into a file in its place")


def unknown_files(folder: Path) -> list[str]:
    """Names in a tag's folder that no save uses. Opens nothing."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted(name for name in names if name != MANIFEST and rank_of_file(name) is None)


def format_file_names(names: Iterable[str]) -> str:
    """`'notes.txt'`, `'a', 'b', 'c' and 5 more`."""
    known = sorted(names)
    more = f" and {len(known) - MAX_NAMES} more" if len(known) > MAX_NAMES else ""
    return ", ".join(f"{name!r:.120}" for name in known[:MAX_NAMES]) + more


def tag_folder(root: Path, tag: str) -> Path:
    """The folder of `tag`, or its aside copy after a kill between the two renames of a replacement."""
    folder, aside = root / check_safe_name(tag, "tag"), root / (ASIDE_PREFIX + tag)
    return aside if not folder.exists() and (aside / MANIFEST).exists() else folder


def check_tag_exists(root: Path, tag: str) -> str:
    """Return the tag; CheckpointError if it does not exist."""
    if not tag_folder(root, tag).is_dir():
        raise CheckpointError(f"no tag {tag} under {root}, which holds {names_in(root)}" if tag_names(root) else
                              f"no tag {tag}: {no_checkpoint_message(root)}")
    return tag


def read_tag_manifest(root: Path, tag: str) -> Manifest:
    """The manifest of one tag; CheckpointError if it is missing or invalid."""
    folder = tag_folder(root, tag)
    if (target := link_target_outside(folder, root)) is not None:
        raise CheckpointError(f"tag {tag}: {folder} is a link to {target}, outside the save root, and is not followed; "
                              "give that folder itself, or move it here")
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(f"tag {tag}: {MANIFEST} missing in {folder}{describe_format(folder)}")
    where = f"tag {folder.name}: {MANIFEST}"
    manifest = parse_manifest(read_bytes(folder / MANIFEST, where), where)
    if manifest.tag != tag:
        raise CheckpointError(f"tag {tag}: {MANIFEST} is of tag {manifest.tag}")
    return manifest


# ---- all tags -------------------------------------------------------------------------------------------------------

def scan_tags(root: Path, check: Callable[[Path, str], Manifest] = read_tag_manifest
              ) -> dict[str, Manifest | CheckpointError]:
    """Every folder that is or should be a tag, by step: what `check` returns for it, or its error. These are folders
    or links that are named by a step, that `latest` names, or that hold a manifest (perhaps under another name)."""
    try:
        entries = sorted(os.listdir(root))
    except (FileNotFoundError, NotADirectoryError):
        return {}  # a missing root holds no checkpoint; the caller reports it
    except OSError as error:  # an unreadable one may hold some, so this is not a fresh start
        raise CheckpointError(f"{root}: cannot be read ({error.strerror})") from error
    latest, found = latest_tag(root), dict[str, Manifest | CheckpointError]()
    for entry in entries:
        # A copy that was moved aside counts under its own name: it is the tag until the new one is there.
        tag, folder = entry.removeprefix(ASIDE_PREFIX), root / entry
        if entry.startswith(".") and tag == entry:
            continue
        is_step = iteration_of_tag(tag) is not None and (folder.is_symlink() or _holds_files(folder))
        if is_step or tag == latest or os.path.lexists(folder / MANIFEST):
            try:
                with explain_read_errors(f"tag {tag}"):
                    found[tag] = check(root, tag)
            except CheckpointError as error:
                found[tag] = error

    steps = {tag: _step(tag, manifest) for tag, manifest in found.items()}
    return {tag: found[tag] for tag in sorted(found, key=lambda tag: (steps[tag] is None, steps[tag] or 0, tag))}


def _step(tag: str, manifest: Manifest | CheckpointError) -> int | None:
    """Of the name or the manifest; None for a damaged tag of another name."""
    step = iteration_of_tag(tag)
    return manifest.iteration if step is None and isinstance(manifest, Manifest) else step


def iterations_by_tag(root: Path) -> dict[str, int]:
    """Tag -> iteration, by iteration: every folder named global_step<N>, and any other with a valid manifest."""
    steps = {tag: _step(tag, manifest) for tag, manifest in scan_tags(root).items()}
    return {tag: step for tag, step in steps.items() if step is not None}


def tag_names(root: Path) -> list[str]:
    return list(iterations_by_tag(root))


def names_in(root: Path) -> str:
    """`tag_names` for a message; of many only the first and last."""
    names = tag_names(root)
    return ", ".join(names if len(names) < 8 else [*names[:2], f"{len(names) - 5} more", *names[-3:]]) or "none"


def commit_records(root: Path) -> list[Manifest]:
    """The manifests of all complete tags, in order of commit."""
    complete = [manifest for manifest in scan_tags(root).values() if isinstance(manifest, Manifest)]
    return sorted(complete, key=lambda record: record.commit_order)


def has_no_checkpoint(root: Path) -> bool:
    """Whether the root has no checkpoint. Raises CheckpointError if it holds another program's."""
    check_latest_inside(root)
    empty = not scan_tags(root)
    if empty and describe_format(root):
        raise CheckpointError(no_checkpoint_message(root))
    return empty


# ---- what the user names --------------------------------------------------------------------------------------------

def parse_checkpoint_path(name: str | os.PathLike[str]) -> tuple[Path, str | None]:
    """`DIR`, `DIR:TAG` or the folder of one tag -> (save root, tag or None). An existing folder is taken literally,
    colons included."""
    path = Path(name)
    if (path / MANIFEST).is_file():
        folder = path.resolve()
        return folder.parent, folder.name
    root, colon, tag = str(name).rpartition(":")
    if colon and root and is_safe_name(tag) and not path.exists():
        return Path(root), tag
    return path, None


def find_tag_of_step(root: Path, step: int) -> tuple[str, str | None]:
    """The tag of iteration `step`, and a note if there are several; the one committed last is used."""
    found = [record.tag for record in commit_records(root) if record.iteration == step]
    # a damaged one: loading it reports the damage
    found = found or [tag for tag, of in iterations_by_tag(root).items() if of == step]
    if not found:
        raise CheckpointError(f"--ckpt-step {step}: no checkpoint of it under {root}, which holds {names_in(root)}")
    *others, tag = found
    return tag, f"step {step} has {len(found)} tags; {tag} was saved after {', '.join(others)}" if others else None


# ---- latest ---------------------------------------------------------------------------------------------------------

def read_latest(root: Path) -> str | None:
    """Content of `latest`; None if it is missing. A link out of the root is not followed."""
    path = root / LATEST
    try:
        if link_target_outside(path, root) is not None or not path.is_file():  # reading a named pipe would never end
            return None
        with open(path, "rb") as file:
            return file.read(256).decode("utf-8", "replace").strip()
    except OSError:
        return None


def committed_pending_tag(root: Path) -> str | None:
    """The tag of a save that was interrupted after its commit and before `latest` was written; usually None."""
    try:
        data = read_bytes(root / PENDING_LATEST, PENDING_LATEST)
        pending = check_record(parse_json(data, PENDING_LATEST), PENDING_LATEST,
                               {"tag": str, "seal": str, "was": str | None})
    except CheckpointError:
        return None
    tag: str = pending["tag"]
    # If someone has edited `latest` since, the edit wins. A tag with another checksum is an earlier save of that name.
    is_current = is_safe_name(tag) and pending["was"] == read_latest(root)
    return tag if is_current and read_manifest_end(tag_folder(root, tag))[1] == pending["seal"] else None


def latest_tag(root: Path) -> str | None:
    """The tag that a load uses, if `latest` names an existing, non-empty folder; else None."""
    tag = committed_pending_tag(root) or read_latest(root)
    return tag if tag is not None and is_safe_name(tag) and _holds_files(tag_folder(root, tag)) else None


# ---- the choice -----------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class TagChoice:
    """Which tag a load uses. Any may be damaged."""

    first: str  # the tag that was asked for, or that of `latest`, or the newest
    fallbacks: list[str]  # its ancestors, newest commit first, which may replace it
    no_fallback_reason: str  # why no other tag may
    assumption: str  # a note if its ancestry is unknown and was assumed; otherwise ""
    warning: str | None  # why a tag is taken by default that `latest` does not name
    is_requested: bool


def choose_tag(root: Path, requested: str | None = None) -> TagChoice:
    """The tag of a load, without a request the newest one. CheckpointError if there is none, or not the requested
    one."""
    if requested is None:
        check_latest_inside(root)
    else:
        check_tag_exists(root, requested)
    # Damaged tags count as well: a load of the newest one must fail, not silently go back further.
    tags, first = scan_tags(root), requested or latest_tag(root)
    if not tags and first is None:
        raise CheckpointError(no_checkpoint_message(root) + dangling(root))
    complete = [manifest for manifest in tags.values() if isinstance(manifest, Manifest)]
    good: dict[str, CommitRecord] = {record.tag: record for record in sorted(
        complete, key=lambda record: record.commit_order, reverse=True)}
    newest = next(iter(good.values()), None)
    if first is None:
        # Neither a request nor `latest`: the tag saved last. A damaged manifest has no commit number, so a damaged tag
        # is compared by its step and by the history that rank 0's manifest repeats.
        stated = [_record_stated_by_rank_0(root, tag) or CommitRecord(tag, iteration_of_tag(tag) or 0, "")
                  for tag in reversed(tags) if tag not in good]
        damaged = [record for record in stated if newest is None or record.iteration > newest.iteration
                   or record.descends_from(newest)]
        first = max(damaged, key=lambda record: record.iteration).tag if damaged or newest is None else newest.tag
    known = good.get(first) or _record_stated_by_rank_0(root, first)
    if known is None and newest is not None:
        # Assume that it continues the newest tag, unless another tag is not on that branch.
        step = iteration_of_tag(first)
        last = replace(newest, iteration=newest.iteration if step is None else step)
        known = last if all(last.descends_from(record) for record in good.values()) else None
    fallbacks = [tag for tag, record in good.items() if tag != first and known and known.descends_from(record)]
    reason = (f"the branch of {first} is unknown, and the other tags are not all on one: name the tag to load"
              if known is None and good else "no tag is there that it continues from: name another one")
    assumption = "" if known is None or known.tag == first else (
        f" (the branch of {first} is unknown; it is taken to have continued from {known.tag})")
    is_unexpected = requested is None and read_latest(root) != first
    return TagChoice(first, fallbacks, reason, assumption, _latest_file_warning(root, first) if is_unexpected else None,
                     requested is not None)


def _record_stated_by_rank_0(root: Path, tag: str) -> CommitRecord | None:
    """The CommitRecord in rank 0's manifest, for a damaged main manifest; None if unreadable. The commit number is not
    stored there: every other tag then counts as earlier."""
    folder, where = tag_folder(root, tag), rank_manifest_name(0)
    if link_target_outside(folder, root) is not None:
        return None
    try:
        record = unseal_record(read_bytes(folder / where, where), where)
        origin = check_record(record.get("origin"), where, {"tag": str, "iteration": int, "run_id": str},
                              {"save_id": str, "rank": int})
        lineage = check_record(record.get("lineage"), where, {"branch": str, "history": list})
        stated = CommitRecord(origin["tag"], origin["iteration"], origin["run_id"], lineage["branch"],
                              history=parse_history(lineage["history"], where))
    except CheckpointError:
        return None
    return stated if stated.tag == tag else None


def _holds_files(folder: Path) -> bool:
    try:
        return folder.is_dir() and any(folder.iterdir())
    except OSError:
        return True  # opening it reports the error


def _latest_file_warning(root: Path, chosen: str) -> str:
    """Why the tag `chosen` is taken, which `latest` does not name."""
    content = read_latest(root)
    if committed_pending_tag(root) == chosen:
        state = "is missing" if content is None else f"says {content!r:.60}"
        return f"warning: {root / LATEST} {state}: the save of {chosen} was interrupted after its commit; it is taken"
    state = dangling(root) or f"; {root / LATEST} is missing"
    return f"warning: {state[2:]}; {root} holds {names_in(root)}, and the tag saved last is {chosen}"


def dangling(root: Path) -> str:
    """A clause naming a tag in `latest` that does not exist; "" without the file."""
    content = read_latest(root)
    if content is None:
        return ""
    return f"; {root / LATEST} " + (f"names {content}, which is not there" if is_safe_name(content) else
                                    f"says {content!r:.60}, which is no name of a tag")


# ---- checkpoints of other programs ----------------------------------------------------------------------------------

CONVERT_COMMAND = "`python -m megatron.checkpoint convert"


def no_checkpoint_message(root: Path) -> str:
    """The error text for a folder without a checkpoint of ours."""
    runs = sorted(str(path.parent) for path in root.glob(f"*/{LATEST}"))[:3]
    hint = ": there is no such folder" if not root.exists() else f"; did you mean {' or '.join(runs)}?" if runs else ""
    return f"no committed checkpoint under {root}{hint}{describe_format(root)}"


def describe_format(path: Path) -> str:
    """"; it is FORMAT: ADVICE", or "" for an unknown format."""
    try:
        sentence = _detect_format(path)
    except OSError:  # an unreadable folder is not recognised
        return ""
    return f"; it is {sentence}" if sentence else ""


def _detect_format(path: Path) -> str | None:
    latest = read_latest(path)
    for folder in (path, path / latest) if latest is not None and is_safe_name(latest) else (path,):
        if any(folder.glob("*mp_rank_*_model_states.pt")) or any(folder.glob("*zero_pp_rank_*_optim_states.pt")):
            root, tag = path.parent if folder == path else path, folder.resolve().name
            return (f"a DeepSpeed checkpoint (tag {tag}): resume it with DeepSpeed, or take its weights with "
                    f"`python {root}/zero_to_fp32.py {root} OUT -t {tag}`, then {CONVERT_COMMAND} OUT --output NEW` "
                    "(docs/checkpoints.md)")
    advice = f"{CONVERT_COMMAND} {path} --output NEW` makes a checkpoint of its weights, for `--load NEW --finetune`"
    if (path / "latest_checkpointed_iteration.txt").is_file() or any(path.glob("mp_rank_*/model_optim_rng.pt")):
        return f"a Megatron-LM checkpoint: {advice}"
    if (path / ".metadata").is_file():
        return ("a checkpoint of torch.distributed.checkpoint (DCP): make one file of it with `python -m "
                f"torch.distributed.checkpoint.format_utils dcp_to_torch {path} OUT/pytorch_model.bin`, then "
                f"{CONVERT_COMMAND} OUT --output NEW` (a Hugging Face GPT-2, its config.json copied into OUT)")
    weights = [name for name in ("model.safetensors", "pytorch_model.bin", "model.safetensors.index.json",
                                 "pytorch_model.bin.index.json") if (path / name).is_file()]
    if weights and (path / "config.json").is_file():
        return f"a Hugging Face folder: start from it with --load-hf {path}, or {advice}"
    if weights:
        return (f"a folder with {weights[0]}, but without the config.json that says which Hugging Face model it is: "
                f"copy it there; of a Megatron GPT-2, {CONVERT_COMMAND} {path / weights[0]} --num-attention-heads N "
                "--checkpoint-version V --output NEW`")
    if (path / "ckpt.pt").is_file():
        return f"a nanoGPT folder: {advice}"
    if path.is_file() and path.suffix in (".pt", ".bin", ".pth"):
        return f"a torch file: if nanoGPT wrote it, or it is a state dict of a Megatron GPT-2, {advice}"
    return None
