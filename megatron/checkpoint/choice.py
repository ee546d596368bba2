"""Which checkpoint a load uses: the one named by the user or by `latest`, or the newest. No torch.

    DIR:TAG, --ckpt-step N    the tag that was asked for
    DIR                       the tag that the file `latest` names
    DIR without `latest`,     the newest tag, with a warning
    or it names no tag

`latest` decides because a step number cannot: after going back to step 4, step 6 of the new branch follows step 8 of
the abandoned one. *Newest* means committed last. The manifest records that time, so copying or restoring a folder does
not change the order, and within a save root it always increases, whatever the clocks say (commit.py).

A kill between the commit of a tag and the writing of `latest` is covered by `.latest-pending`, which commit.py writes
before: it identifies the manifest about to be committed. Where that manifest is in place, its tag is the latest.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.checkpoint.manifest import LATEST, MANIFEST, Manifest, is_safe_name, step_of
from megatron.checkpoint.recognise import nothing_under, recognise
from megatron.checkpoint.stamp import seal_of, stamp_of
from megatron.checkpoint.strangers import check_latest_inside, target_outside
from megatron.checkpoint.strict import Record, parse_json, read_bytes
from megatron.checkpoint.tags import ASIDE, complete, folder_of, manifest_of, steps_of, tag_names
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

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


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
    found = sorted((m for m in complete(root) if m.iteration == step), key=lambda m: _order(root, m))
    if not found:
        held = ", ".join(tag_names(root)) or "none"
        raise CheckpointError(f"--ckpt-step {step}: no complete checkpoint of it under {root}, which holds {held}")
    tag, others = found[-1].tag, [manifest.tag for manifest in found[:-1]]
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
    return sorted(complete(root), key=lambda manifest: _order(root, manifest))


def steps_oldest_first(root: Path) -> list[tuple[str, int, str]]:
    """(tag, step, run id) of all complete tags named by their step, in order of commit. Nothing is parsed."""
    found = []
    for tag, step in steps_of(root).items():
        if target_outside(folder_of(root, tag), root) is not None:
            continue  # of somebody else's
        stamp = stamp_of(folder_of(root, tag))
        if step_of(tag) is not None and stamp is not None and stamp.tag == tag:
            found.append((stamp.saved_at, step, tag, stamp.run_id))
    return [(tag, step, run_id) for _, step, tag, run_id in sorted(found)]


def _order(root: Path, manifest: Manifest) -> tuple[int, int, int]:
    """By time of commit. Manifests of format 1 do not record it: those are older, and ordered by step."""
    try:
        written = (folder_of(root, manifest.tag) / MANIFEST).stat().st_mtime_ns
    except OSError:
        written = 0
    return manifest.saved_at, manifest.iteration, written


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
        raise CheckpointError(nothing_under(root))
    return found if latest in (None, *found) else [*found, str(latest)]


def unreadable(root: Path) -> dict[str, CheckpointError]:
    """Tags that are not complete, and why: folders, or links, that `latest` names, that are named by a step, or that
    hold a manifest (under a name that may not be its own)."""
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
                manifest_of(root, tag)
            except CheckpointError as error:
                found[tag] = error
            except OSError as error:
                found[tag] = CheckpointError(f"tag {tag}: cannot be read ({error.strerror})")
    return dict(sorted(found.items(), key=lambda item: (step_of(item[0]) or 0, item[0])))


def candidates(root: Path) -> list[str]:
    """The tags that a load may use, the best first, at least one. Any may be damaged: the caller finds out.

    First the tag of `latest`, then tags of at most its step, those committed last first; without a `latest`, all tags.
    """
    there, latest = set(all_tags(root)), latest_tag(root)
    steps = {tag: step for tag, step in steps_of(root).items() if tag in there}
    good = [manifest.tag for manifest in reversed(oldest_first(root))]
    # A damaged manifest does not say when it was committed: here the step decides.
    newest = steps[good[0]] if good else -1
    damaged = [tag for tag in reversed(steps) if tag not in good]
    order = [*(tag for tag in damaged if steps[tag] > newest), *good, *(tag for tag in damaged if steps[tag] <= newest)]
    if latest is None:
        return order
    limit = steps.get(latest)
    return [latest, *(tag for tag in order if tag != latest and (limit is None or steps[tag] <= limit))]


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
    state = "is missing" if said is None else f"says {said!r:.60}"
    if committed_pending(root) == chosen:
        return f"warning: {root / LATEST} {state}: the save of {chosen} was interrupted after its commit; it is taken"
    return f"warning: {root / LATEST} {state}; the newest complete tag is {chosen}"
