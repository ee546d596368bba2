"""A checkpoint that is signed: nothing can be changed, left out or put in its place without the key."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron.checkpoint import command, writer
from megatron.checkpoint.choice import latest_tag
from megatron.checkpoint.interchange import zero_to_fp32
from megatron.checkpoint.manifest import MANIFEST, commit_of, record_of
from megatron.checkpoint.reader import open_checkpoint
from megatron.checkpoint.strict import Key, read_key
from megatron.checkpoint.tags import verify
from megatron.errors import EXIT_CHECKPOINT, EXIT_CONFIG, CheckpointError, ConfigError
from tests.megatron.checkpoint.made import Grid, make_format_3, redigest, reseal, rewrite, save_grid
from tests.megatron.helpers import TINY, train

KEY, OTHER = Key(b"k" * 32), Key(b"o" * 32)
TAG = "global_step1"


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("signed")
    save_grid(root, Grid(1, 2), key=KEY)
    return root


def refused_by_all(root: Path, key: Key = KEY) -> bool:
    readers: list[Callable[[], Any]] = [
        lambda: verify(root, TAG, key), lambda: open_checkpoint(root, TAG, key=key),
        lambda: zero_to_fp32.open_tag(root, TAG, key.secret).entries()]
    refused = 0
    for read in readers:
        try:
            read()
        except (CheckpointError, zero_to_fp32.Damaged):
            refused += 1
    return refused == len(readers)


def test_it_is_read_with_the_key_and_without(signed: Path) -> None:
    for key in (KEY, None):
        verify(signed, TAG, key)
        assert open_checkpoint(signed, key=key).shared_state["scale"] == 2.0
        assert zero_to_fp32.open_tag(signed, TAG, key.secret if key else None).entries()
    record = record_of(signed / TAG)
    assert record is not None and record.commit == commit_of(signed / TAG) > 0 and latest_tag(signed) == TAG


def test_another_key_and_no_signature_are_refused(signed: Path, tmp_path: Path) -> None:
    assert refused_by_all(signed, OTHER)
    with pytest.raises(CheckpointError, match="its signature is not of the key of --checkpoint-key"):
        verify(signed, TAG, OTHER)
    save_grid(tmp_path, Grid(1, 2))
    assert refused_by_all(tmp_path)
    with pytest.raises(CheckpointError, match="is not signed, and --checkpoint-key takes only what is"):
        verify(tmp_path, TAG, KEY)
    make_format_3(tmp_path, TAG)
    assert refused_by_all(tmp_path)


def unsigned(body: dict[str, Any]) -> None:
    body.pop("hmac", None)


def changed_weights(folder: Path) -> None:
    path = folder / "rank0.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")


def with_the_same_crc32(folder: Path) -> None:
    """A checksum is no signature: four bytes make it what it was."""
    path = folder / "rank0.safetensors"
    data = path.read_bytes()
    table = [zlib.crc32(bytes([byte])) ^ zlib.crc32(b"\0") for byte in range(256)]
    state, wanted = zlib.crc32(data[:-5] + b"\1") ^ 0xFFFFFFFF, zlib.crc32(data) ^ 0xFFFFFFFF
    for _ in range(4):
        index = next(byte for byte, value in enumerate(table) if value >> 24 == wanted >> 24)
        wanted = (wanted ^ table[index]) << 8 & 0xFFFFFFFF | index
    forged = data[:-5] + b"\1" + (state ^ wanted).to_bytes(4, "little")
    assert forged != data and zlib.crc32(forged) == zlib.crc32(data)
    path.write_bytes(forged)


FORGERIES: dict[str, Callable[[Path], object]] = {
    "weights": changed_weights, "weights of the same crc32": with_the_same_crc32,
    "shared state": lambda folder: rewrite(folder / "shared.json", lambda shared: shared["state"].update(scale=4.0)),
    "the manifest": lambda folder: rewrite(folder / MANIFEST, lambda body: (body.update(iteration=9), redigest(body))),
    "a rank's state": lambda folder: rewrite(folder / "rank1.json", lambda part: part["state"].update(seed=7)),
    "nothing, unsigned": lambda folder: rewrite(folder / MANIFEST, unsigned),
    "nothing, a part unsigned": lambda folder: rewrite(folder / "rank0.json", unsigned),
    "nothing, signed by another": lambda folder: [rewrite(path, unsigned, OTHER) for path in folder.glob("*.json")
                                                  if path.name not in ("shared.json", "config.json")]}


@pytest.mark.parametrize("what", FORGERIES)
@pytest.mark.parametrize("sums", ["as they were", "made to fit", "made to fit and signed by another"])
def test_what_is_forged_is_refused(what: str, sums: str, signed: Path, tmp_path: Path) -> None:
    shutil.copytree(signed / TAG, tmp_path / TAG)
    FORGERIES[what](tmp_path / TAG)
    if sums != "as they were":
        reseal(tmp_path / TAG, OTHER if "signed" in sums else None)
    assert refused_by_all(tmp_path)


def test_files_of_another_signed_checkpoint_are_refused(signed: Path, tmp_path: Path) -> None:
    save_grid(tmp_path / "b", Grid(1, 2), seed=1, key=KEY)
    for name in ("rank0.json", "rank0.safetensors", "shared.json", MANIFEST):
        shutil.copytree(signed / TAG, tmp_path / TAG, dirs_exist_ok=True)
        shutil.copy(tmp_path / "b" / TAG / name, tmp_path / TAG / name)
        assert refused_by_all(tmp_path), name


def test_ranks_with_different_keys_save_nothing(tmp_path: Path) -> None:
    saving = writer.saving

    def own(*args: Any, **kwargs: Any) -> writer.Saving:
        return saving(*args, **{**kwargs, "key": Key(bytes([kwargs["world"].rank]) * 32)})

    with mock.patch.object(writer, "saving", own):
        found = save_grid(tmp_path, Grid(1, 2))
    assert all("rank 1 and rank 0 have different keys to sign with" in str(error) for error in found)
    assert not (tmp_path / TAG).exists()


@pytest.mark.parametrize(("content", "message"), [
    (None, "cannot be read"), (b"", "has 0"), (b"short\n", "has 5"), (b"x" * 70_000, "16 to 65536 bytes")])
def test_a_key_that_is_none_is_a_usage_error(content: bytes | None, message: str, tmp_path: Path, signed: Path,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_key(path)
    assert command.main(["verify", str(signed), "--checkpoint-key", str(path)]) == EXIT_CONFIG
    assert zero_to_fp32.main([str(signed), str(tmp_path / "out.safetensors"), "--checkpoint-key", str(path)]) == 2
    assert str(KEY.secret) not in capsys.readouterr().err and "kkk" not in repr(KEY)


def test_the_commands_take_it(signed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "key").write_bytes(KEY.secret + b"\n")
    (tmp_path / "other").write_bytes(OTHER.secret)
    good, bad = (["--checkpoint-key", str(tmp_path / name)] for name in ("key", "other"))
    for asked in (["verify", str(signed)], ["digest", str(signed)],
                  ["merge", str(signed), "--output", str(tmp_path / "a.safetensors")]):
        assert command.main([*asked, *good]) == 0
        assert command.main([*asked, *bad]) == EXIT_CHECKPOINT
    assert zero_to_fp32.main([str(signed), str(tmp_path / "b.safetensors"), *good]) == 0
    assert zero_to_fp32.main([str(signed), str(tmp_path / "c.safetensors"), *bad]) == 4
    with pytest.raises(ConfigError, match="list checks no signature; verify does"):
        command.parse(["list", str(signed), *good])
    assert command.main(["list", str(signed)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("  signed  latest")
    assert json.loads((signed / TAG / "config.json").read_text()) == {"hidden": 8}


def test_a_run_signs_what_it_saves_and_resumes_only_from_its_own(tmp_path: Path) -> None:
    for name, key in (("key", KEY), ("other", OTHER)):
        (tmp_path / name).write_bytes(key.secret)
    run = [*TINY, "--mock-data", "--save", tmp_path / "a", "--load", tmp_path / "a", "--train-iters", 4]
    train([*run, "--checkpoint-key", tmp_path / "key", "--exit-interval", 1])
    verify(tmp_path / "a", TAG, KEY)
    with pytest.raises(CheckpointError, match="its signature is not of the key of --checkpoint-key"):
        train([*run, "--checkpoint-key", tmp_path / "other"])
    train([*run, "--checkpoint-key", tmp_path / "key", "--exit-interval", 1])
    verify(tmp_path / "a", "global_step2", KEY)
    said = train([*run, "--exit-interval", 1])
    assert "warning: global_step2 is signed, which was not checked, and what this run saves is not signed: " in said
    with pytest.raises(CheckpointError, match="global_step3: manifest.json: is not signed"):
        train([*run, "--checkpoint-key", tmp_path / "key"])
    int8 = ["convert", str(tmp_path / "a:global_step2"), "--dtype", "int8", "--output", str(tmp_path / "q")]
    assert command.main([*int8, "--checkpoint-key", str(tmp_path / "key")]) == 0
    verify(tmp_path / "q", "global_step2", KEY)
    with pytest.raises(ConfigError, match="--checkpoint-key .*absent: cannot be read"):
        train([*run, "--checkpoint-key", tmp_path / "absent"])
