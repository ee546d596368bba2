"""Decide which tag a load uses: the one the user or `latest` names, or the newest. No torch.

    DIR:TAG, --ckpt-step N    the tag that was asked for
    DIR                       the tag that the file `latest` names
    DIR without `latest`      the newest tag, with a warning (likewise if `latest` names no tag)

*Newest* means committed last, by the commit number in the manifest, not by step or clock: after going back to step 4,
step 6 of the new branch follows step 8 of the abandoned one. If the chosen tag is damaged, only its ancestors may
replace it. `.latest-pending` covers a kill between the commit of a tag and the writing of `latest`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megatron.checkpoint.convert.detect_format import describe_format, no_checkpoint_message
from megatron.checkpoint.file_formats import (StrictRecord, explain_read_errors, parse_json, read_bytes,
                                              unseal_record)
from megatron.checkpoint.manifest import (LATEST, MANIFEST, CommitRecord, Manifest, is_safe_name, iteration_of_tag,
                                          manifest_checksum, parse_lineage, read_commit_record)
from megatron.checkpoint.rank_manifest import rank_manifest_name
from megatron.checkpoint.tags import (ASIDE_PREFIX, check_latest_inside, complete_manifests, iterations_by_tag,
                                      link_target_outside, names_in, read_tag_manifest, tag_folder, tag_names)
from megatron.errors import CheckpointError

PENDING_LATEST = ".latest-pending"
"""What `latest` will name after the commit: `tag`, its manifest checksum `seal` (an older tag of that name has
another), and `was`, the previous content of `latest` (if the file was edited since, the edit wins)."""


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
    found = [manifest.tag for manifest in manifests_in_commit_order(root) if manifest.iteration == step]
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
        record = StrictRecord(parse_json(read_bytes(root / PENDING_LATEST, PENDING_LATEST), PENDING_LATEST),
                              PENDING_LATEST)
        tag, seal, was = record.take_field("tag", str), record.take_field("seal", str), record.fields.get("was")
    except CheckpointError:
        return None
    is_outdated = not is_safe_name(tag) or (was if isinstance(was, str) else None) != read_latest(root)
    return None if is_outdated or manifest_checksum(tag_folder(root, tag)) != seal else tag


def latest_tag(root: Path) -> str | None:
    """The tag that a load uses, if `latest` names an existing, non-empty folder; else None."""
    tag = committed_pending_tag(root) or read_latest(root)
    return tag if tag is not None and is_safe_name(tag) and _holds_files(tag_folder(root, tag)) else None


# ---- the order of tags ----------------------------------------------------------------------------------------------

def manifests_in_commit_order(root: Path) -> list[Manifest]:
    return sorted(complete_manifests(root), key=lambda manifest: manifest.commit_record.commit_order)


def step_records_in_commit_order(root: Path) -> list[CommitRecord]:
    """CommitRecords, without histories, of complete `global_step<N>` tags in order of commit. No manifest is parsed."""
    found = [read_commit_record(tag_folder(root, tag)) for tag in iterations_by_tag(root)
             if iteration_of_tag(tag) is not None and link_target_outside(tag_folder(root, tag), root) is None]
    return sorted((record for record in found if record is not None), key=lambda record: record.commit_order)


def has_no_checkpoint(root: Path) -> bool:
    """Whether the root has no checkpoint. Raises CheckpointError if it holds another program's."""
    check_latest_inside(root)
    empty = not tag_names(root) and latest_tag(root) is None
    if empty and describe_format(root):
        raise CheckpointError(no_checkpoint_message(root))
    return empty


def all_tags(root: Path) -> list[str]:
    """Every folder that is or should be a checkpoint, by step; CheckpointError if there is none."""
    check_latest_inside(root)
    latest, found = latest_tag(root), [tag for tag in tag_names(root) if _holds_files(tag_folder(root, tag))]
    if not found and latest is None:
        raise CheckpointError(no_checkpoint_message(root) + dangling(root))
    return found if latest in (None, *found) else [*found, str(latest)]


def unreadable_tags(root: Path,
                    check: Callable[[Path, str], Manifest] = read_tag_manifest) -> dict[str, CheckpointError]:
    """Tags that fail `check`, with the error: folders or links that `latest` names, that are named by a step, or that
    hold a manifest (perhaps under another name)."""
    try:
        entries = sorted(os.listdir(root))
    except OSError:
        return {}  # listing the complete tags reports it
    latest, found = latest_tag(root), dict[str, CheckpointError]()
    for entry in entries:
        tag, folder = entry.removeprefix(ASIDE_PREFIX), root / entry
        if entry.startswith(".") and tag == entry:
            continue
        is_step = iteration_of_tag(tag) is not None and (folder.is_symlink()
                                                         or folder.is_dir() and _holds_files(folder))
        if is_step or tag == latest or os.path.lexists(folder / MANIFEST):
            try:
                with explain_read_errors(f"tag {tag}"):
                    check(root, tag)
            except CheckpointError as error:
                found[tag] = error
    return dict(sorted(found.items(), key=lambda item: (iteration_of_tag(item[0]) or 0, item[0])))


def load_candidates(root: Path, requested: str | None = None) -> list[str]:
    """Tags that a load may use, best first, at least one; any may be damaged. First the tag `requested`, or that of
    `latest`, or the newest; then its ancestors, newest commit first."""
    first, known, good = _choose_tag(root, requested)
    return [first, *(tag for tag, record in good.items() if tag != first and known and known.descends_from(record))]


def no_fallback_reason(root: Path, requested: str | None = None) -> str:
    """Why no other tag may replace the first candidate."""
    first, known, good = _choose_tag(root, requested)
    return (f"the branch of {first} is unknown, and the other tags are not all on one: name the tag to load"
            if known is None and good else "no tag is there that it continues from: name another one")


def assumed_ancestor_note(root: Path, requested: str | None = None) -> str:
    """A note if the first candidate's ancestry is unknown and was assumed."""
    first, known, _ = _choose_tag(root, requested)
    return "" if known is None or known.tag == first else (
        f" (the branch of {first} is unknown; it is taken to have continued from {known.tag})")


def _choose_tag(root: Path, requested: str | None) -> tuple[str, CommitRecord | None, dict[str, CommitRecord]]:
    """(first candidate, its CommitRecord or None if unknown, complete tags by newest commit)."""
    first, there, steps = requested or latest_tag(root), all_tags(root), iterations_by_tag(root)
    good = {manifest.tag: manifest.commit_record for manifest in reversed(manifests_in_commit_order(root))}
    newest = next(iter(good.values()), None)
    if first is None:  # a damaged manifest has no commit number: use step and history
        stated = {tag: _record_stated_by_rank_0(root, tag) or CommitRecord(tag, steps.get(tag, 0), "")
                  for tag in dict.fromkeys([*reversed(there), *unreadable_tags(root)]) if tag not in good}
        damaged = [record for record in stated.values() if newest is None or record.iteration > newest.iteration
                   or record.descends_from(newest)]
        first = max(damaged, key=lambda record: record.iteration).tag if damaged or newest is None else newest.tag
    known = good.get(first) or _record_stated_by_rank_0(root, first)
    if known is None and newest is not None:  # assume it continues the newest tag, unless another tag contradicts that
        last = replace(newest, iteration=steps.get(first, newest.iteration))
        known = last if all(last.descends_from(record) for record in good.values()) else None
    return first, known, good


def _record_stated_by_rank_0(root: Path, tag: str) -> CommitRecord | None:
    """The CommitRecord in rank 0's manifest, for a damaged main manifest; None if unreadable. The commit number is not
    stored there: every other tag then counts as earlier."""
    folder, where = tag_folder(root, tag), rank_manifest_name(0)
    if link_target_outside(folder, root) is not None:
        return None
    try:
        record = StrictRecord(unseal_record(read_bytes(folder / where, where), where), where)
        origin = StrictRecord(record.take_field("origin", dict), where)
        branch, history = parse_lineage(StrictRecord(record.take_field("lineage", dict),
                                                     where)) if "lineage" in record.fields else ("", ())
        stated = CommitRecord(origin.take_field("tag", str), origin.take_count("iteration"),
                              origin.take_field("run_id", str), saved_at=10**18, branch=branch, history=history)
    except CheckpointError:
        return None
    return stated if stated.tag == tag else None


def _holds_files(folder: Path) -> bool:
    try:
        return folder.is_dir() and any(folder.iterdir())
    except OSError:
        return True  # opening it reports the error


def latest_file_warning(root: Path, chosen: str) -> str | None:
    """A warning if `latest` does not name the tag `chosen`, which was chosen by default."""
    content = read_latest(root)
    if content == chosen:
        return None
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
