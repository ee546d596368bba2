"""Which checkpoint a load uses: the one named by the user or by `latest`, or the newest. No torch.

    DIR:TAG, --ckpt-step N    the tag that was asked for
    DIR                       the tag that the file `latest` names
    DIR without `latest`,     the newest tag, with a warning
    or it names no tag
    any, --resume-fallback    where that one is damaged, its newest intact ancestor

`latest` decides because a step number cannot: after going back to step 4, step 6 of the new branch follows step 8 of
the abandoned one. *Newest* means committed last, by the number in the manifest (lineage.py): neither copying a folder
nor a clock changes that order. Where the tag chosen so is damaged, only its ancestors may take its place.

For a kill between the commit of a tag and the writing of `latest`, commit.py writes `.latest-pending` before: it
identifies the manifest about to be committed. Where that manifest is in place, its tag is the latest.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.checkpoint.lineage import SaveRecord
from megatron.checkpoint.manifest import LATEST, MANIFEST, Manifest, is_safe_name, record_of, seal_of, step_of
from megatron.checkpoint.part import record_in_part
from megatron.checkpoint.recognise import nothing_under, recognise
from megatron.checkpoint.strangers import check_latest_inside, target_outside
from megatron.checkpoint.strict import Record, parse_json, read_bytes
from megatron.checkpoint.tags import ASIDE, complete, folder_of, manifest_of, names_in, steps_of, tag_names
from megatron.errors import CheckpointError

PENDING = ".latest-pending"


@dataclass(frozen=True)
class Pending:
    """What `latest` is about to say: content of `.latest-pending`."""

    tag: str
    seal: str
    """The checksum that the manifest of the new tag ends with: an older tag of that name has another."""
    was: str | None
    """What `latest` said before; a file edited since then wins."""


# ---- what the user names --------------------------------------------------------------------------------------------

def locate(name: str | os.PathLike[str]) -> tuple[Path, str | None]:
    """`DIR`, `DIR:TAG` or the folder of one tag -> the save root and the tag, if one is named.

    A folder that exists is meant as it is written, colons and all.
    """
    path = Path(name)
    if (path / MANIFEST).is_file():
        folder = path.resolve()
        return folder.parent, folder.name
    root, colon, tag = str(name).rpartition(":")
    if colon and root and is_safe_name(tag) and not path.exists():
        return Path(root), tag
    return path, None


def tag_of_step(root: Path, step: int) -> tuple[str, str | None]:
    """The tag of iteration `step`, and a note where there are several: the one committed last is used."""
    found = [manifest.tag for manifest in oldest_first(root) if manifest.iteration == step]
    found = found or [tag for tag, of in steps_of(root).items() if of == step]  # damaged: a load says how
    if not found:
        raise CheckpointError(f"--ckpt-step {step}: no checkpoint of it under {root}, which holds {names_in(root)}")
    *others, tag = found
    return tag, f"step {step} has {len(found)} tags; {tag} was saved after {', '.join(others)}" if others else None


# ---- latest ---------------------------------------------------------------------------------------------------------

def read_latest(root: Path) -> str | None:
    """What the file says; None where there is none. A link that leads out of the root is not followed."""
    path = root / LATEST
    try:
        if target_outside(path, root) is not None or not path.is_file():  # a pipe in its place would never end
            return None
        with open(path, "rb") as file:
            return file.read(256).decode("utf-8", "replace").strip()
    except OSError:
        return None


def read_pending(root: Path) -> Pending | None:
    try:
        record = Record(parse_json(read_bytes(root / PENDING, PENDING), PENDING), PENDING)
        was = record.fields.pop("was", None)
        return Pending(record.take("tag", str), record.take("seal", str), was if isinstance(was, str) else None)
    except (OSError, CheckpointError):
        return None


def committed_pending(root: Path) -> str | None:
    """The tag that was committed when its save was interrupted before `latest` was written; usually None."""
    pending = read_pending(root)
    if pending is None or not is_safe_name(pending.tag) or pending.was != read_latest(root):
        return None
    return pending.tag if seal_of(folder_of(root, pending.tag)) == pending.seal else None


def latest_tag(root: Path) -> str | None:
    """The tag that a load uses, if `latest` names one: a folder that is there and not empty."""
    tag = committed_pending(root) or read_latest(root)
    return tag if tag is not None and is_safe_name(tag) and _holds_files(folder_of(root, tag)) else None


# ---- the order of tags ----------------------------------------------------------------------------------------------

def oldest_first(root: Path) -> list[Manifest]:
    """The manifests of all complete tags in the order of their commits."""
    return sorted(complete(root), key=lambda manifest: manifest.record.order)


def steps_oldest_first(root: Path) -> list[SaveRecord]:
    """Of all complete tags named by their step, in order of commit, without their histories. Nothing is parsed."""
    found = [record_of(folder_of(root, tag)) for tag in steps_of(root)
             if step_of(tag) is not None and target_outside(folder_of(root, tag), root) is None]
    return sorted((record for record in found if record is not None), key=lambda record: record.order)


def is_empty(root: Path) -> bool:
    """No checkpoint is here, and none of another program either: that is an error which says whose it is."""
    check_latest_inside(root)
    empty = not tag_names(root) and latest_tag(root) is None
    if empty and recognise(root):
        raise CheckpointError(nothing_under(root))
    return empty


def all_tags(root: Path) -> list[str]:
    """Every folder that is, or should be, a checkpoint, by step; at least one."""
    check_latest_inside(root)
    latest, found = latest_tag(root), [tag for tag in tag_names(root) if _holds_files(folder_of(root, tag))]
    if not found and latest is None:
        raise CheckpointError(nothing_under(root) + dangling(root))
    return found if latest in (None, *found) else [*found, str(latest)]


def unreadable(root: Path, check: Callable[[Path, str], Manifest] = manifest_of) -> dict[str, CheckpointError]:
    """Tags that do not pass the check, and why: folders, or links, that `latest` names, that are named by a step, or
    that hold a manifest (under a name that may not be its own)."""
    try:
        entries = sorted(os.listdir(root))
    except OSError:
        return {}  # who lists the complete ones says so
    latest, found = latest_tag(root), dict[str, CheckpointError]()
    for entry in entries:
        tag, folder = entry.removeprefix(ASIDE), root / entry
        if entry.startswith(".") and tag == entry:
            continue
        is_step = step_of(tag) is not None and (folder.is_symlink() or folder.is_dir() and _holds_files(folder))
        if is_step or tag == latest or os.path.lexists(folder / MANIFEST):
            try:
                check(root, tag)
            except CheckpointError as error:
                found[tag] = error
            except OSError as error:
                found[tag] = CheckpointError(f"tag {tag}: cannot be read ({error.strerror})")
    return dict(sorted(found.items(), key=lambda item: (step_of(item[0]) or 0, item[0])))


def candidates(root: Path, asked: str | None = None) -> list[str]:
    """The tags that a load may use, the best first, at least one. Any may be damaged: the caller finds out.

    First the tag `asked` for, or that of `latest`, or the newest one; then its ancestors, those committed last first.
    """
    first, known, good = _choice(root, asked)
    return [first, *(tag for tag, record in good.items() if tag != first and known and known.continues(record))]


def why_alone(root: Path, asked: str | None = None) -> str:
    """Why nothing may take the place of the first candidate."""
    first, known, good = _choice(root, asked)
    return (f"the branch of {first} is unknown, and the other tags are not all on one: name the tag to load"
            if known is None and good else "no tag is there that it continues from: name another one")


def assumption(root: Path, asked: str | None = None) -> str:
    """A note where the first candidate does not state from what it continues, but others are offered."""
    first, known, _ = _choice(root, asked)
    return "" if known is None or known.tag == first else (
        f" (the branch of {first} is unknown; it is taken to have continued from {known.tag})")


def _choice(root: Path, asked: str | None) -> tuple[str, SaveRecord | None, dict[str, SaveRecord]]:
    """The first candidate, what it continues (None: not known), and the complete tags, those committed last first."""
    first, there, steps = asked or latest_tag(root), all_tags(root), steps_of(root)
    good = {manifest.tag: manifest.record for manifest in reversed(oldest_first(root))}
    newest = next(iter(good.values()), None)
    if first is None:  # a damaged manifest does not say when it was committed: here the step and the history decide
        stated = {tag: _stated(root, tag) or SaveRecord(tag, steps.get(tag, 0), "")
                  for tag in dict.fromkeys([*reversed(there), *unreadable(root)]) if tag not in good}
        damaged = [record for record in stated.values() if newest is None or record.iteration > newest.iteration
                   or record.continues(newest)]
        first = max(damaged, key=lambda record: record.iteration).tag if damaged or newest is None else newest.tag
    known = good.get(first) or _stated(root, first)
    if known is None and newest is not None:  # it continues the newest one, unless some tag speaks against that
        last = replace(newest, iteration=steps.get(first, newest.iteration))
        known = last if all(last.continues(record) for record in good.values()) else None
    return first, known, good


def _stated(root: Path, tag: str) -> SaveRecord | None:
    """What the part of rank 0 says of this tag."""
    folder = folder_of(root, tag)
    record = None if target_outside(folder, root) is not None else record_in_part(folder)
    return record if record is not None and record.tag == tag else None


def _holds_files(folder: Path) -> bool:
    try:
        return folder.is_dir() and any(folder.iterdir())
    except OSError:
        return True  # who opens it will say why it cannot be read


def explain_choice(root: Path, chosen: str) -> str | None:
    """A warning where `latest` does not simply name the tag that was chosen without being asked for."""
    said = read_latest(root)
    if said == chosen:
        return None
    if committed_pending(root) == chosen:
        state = "is missing" if said is None else f"says {said!r:.60}"
        return f"warning: {root / LATEST} {state}: the save of {chosen} was interrupted after its commit; it is taken"
    state = dangling(root) or f"; {root / LATEST} is missing"
    return f"warning: {state[2:]}; {root} holds {names_in(root)}, and the tag saved last is {chosen}"


def dangling(root: Path) -> str:
    """The second half of a line: what `latest` names in vain; nothing where there is no such file."""
    said = read_latest(root)
    if said is None:
        return ""
    return f"; {root / LATEST} " + (f"names {said}, which is not there" if is_safe_name(said) else
                                    f"says {said!r:.60}, which is no name of a tag")
