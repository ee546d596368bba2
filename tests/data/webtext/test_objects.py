"""Object stores: stages read URLs, `export` writes them, and each format gives the same documents back."""

from __future__ import annotations

import gzip
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data.storage import DataError, UsageError
from data.webtext.__main__ import main
from data.webtext.documents import Document
from data.webtext.export import FORMATS, open_output
from tests.data.webtext.planted import babble

fsspec = pytest.importorskip("fsspec")


def texts_of(folder: Path) -> list[tuple[str, str]]:
    return [(document["text"], document["url"]) for path in sorted(folder.glob("part-*"))
            for document in map(json.loads, path.read_text().splitlines())]


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    rng, raw = random.Random(1), tmp_path / "raw"
    raw.mkdir()
    for name in ("a", "b"):
        (raw / f"{name}.jsonl").write_bytes(b"".join(
            Document(babble(rng, 40), f"http://{name}.org/{number}", {"n": number}).to_line() for number in range(30)))
    main(["read", str(raw), "--output", str(tmp_path / "stage"), "--shard-bytes", "4K", "--workers", "1"])
    return tmp_path / "stage"


@pytest.fixture(params=["memory", "s3"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty folder: in this process, and on a server of S3's protocol."""
    if request.param == "memory":
        fsspec.filesystem("memory").store.clear()
        yield "memory://bucket/corpus"
        return
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in (("ENDPOINT_URL", f"http://{host}:{port}"), ("ACCESS_KEY_ID", "key"),
                        ("SECRET_ACCESS_KEY", "secret"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # of another server
    s3 = fsspec.filesystem("s3")
    s3.makedirs("bucket", exist_ok=True)  # all servers of a process have the same buckets
    s3.rm("bucket/*", recursive=True) if s3.ls("bucket") else None
    yield "s3://bucket/corpus"
    server.stop()


def test_a_stage_goes_to_a_store_and_comes_back(stage: Path, store: str, tmp_path: Path) -> None:
    for to in FORMATS:
        main(["export", str(stage), "--output", f"{store}/{to}", "--to", to, "--workers", "1"])
        main(["read", f"{store}/{to}", "--output", str(tmp_path / to), "--workers", "1"])
        assert texts_of(tmp_path / to) == texts_of(stage)
        main(["read", f"{store}/{to}/part-00000.{to}", "--output", str(tmp_path / f"one {to}"), "--workers", "1"])
        assert texts_of(tmp_path / f"one {to}") == texts_of(stage)[:len(texts_of(tmp_path / f"one {to}"))] != []
    with pytest.raises(ZeroDivisionError), open_output(f"{store}/half") as file:
        file.write(b"half of it")
        raise ZeroDivisionError
    system, path = fsspec.url_to_fs(f"{store}/half")
    assert not system.exists(path), "what failed is not there"
    with pytest.raises(DataError, match="no file to read"):
        main(["read", f"{store}/nothing", "--output", str(tmp_path / "nothing"), "--workers", "1"])


def test_an_object_that_changed_is_read_again(store: str, tmp_path: Path) -> None:
    with fsspec.open(f"{store}/a.jsonl", "wb") as file:
        file.write(Document("one").to_line())
    read = ["read", f"{store}/a.jsonl", "--output", str(tmp_path / "out"), "--workers", "1"]
    main(read)
    first = (tmp_path / "out/part-00000.jsonl").stat().st_mtime_ns
    main(read)
    assert (tmp_path / "out/part-00000.jsonl").stat().st_mtime_ns == first, "nothing to do"
    with fsspec.open(f"{store}/a.jsonl", "wb") as file:
        file.write(Document("two").to_line())
    fsspec.filesystem(store.partition(":")[0]).invalidate_cache()
    main(read)
    assert b"two" in (tmp_path / "out/part-00000.jsonl").read_bytes()


def test_local_exports_hold_the_shards_to_the_byte(stage: Path, tmp_path: Path) -> None:
    for to in FORMATS:
        for name in ("one", "two"):
            main(["export", str(stage), "--output", str(tmp_path / name), "--to", to, "--workers", "1"])
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len(files) == 3 * len([*stage.glob("part-*")])
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in files)
    with gzip.open(tmp_path / "one/part-00000.jsonl.gz") as file:
        assert file.read() == (stage / "part-00000.jsonl").read_bytes()


def test_the_network_failing_is_no_damage_of_the_content(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Breaking(io.BytesIO):
        """A connection that breaks after the first kilobyte."""

        def readinto(self, buffer: Any) -> int:
            if self.tell() >= 1024:
                raise TimeoutError("timed out")
            return super().readinto(memoryview(buffer)[:1024])

    system = fsspec.filesystem("memory")
    content = b"".join(Document(str(number)).to_line() for number in range(3000))
    system.pipe("/bucket/a.jsonl", content)
    monkeypatch.setattr(type(system), "open", lambda self, *args, **kwargs: Breaking(content))
    with pytest.raises(DataError, match=r"a.jsonl: cannot read on: timed out"):
        main(["read", "memory://bucket/a.jsonl", "--output", str(tmp_path / "out"), "--on-error", "skip",
              "--workers", "1"])


def test_an_export_is_apart_and_whole(stage: Path, tmp_path: Path) -> None:
    main(["export", str(stage), "--output", str(tmp_path / "out"), "--to", "jsonl.gz", "--workers", "1"])
    for output in (tmp_path / "out", stage, stage / "inside"):
        with pytest.raises(UsageError):
            main(["export", str(stage), "--output", str(output), "--to", "jsonl.gz", "--workers", "1"])
    shard = stage / "part-00000.jsonl"
    shard.write_bytes(shard.read_bytes().replace(b"the", b"teh", 1))
    with pytest.raises(DataError, match="sha256"):
        main(["export", str(stage), "--output", str(tmp_path / "other"), "--workers", "1"])


def test_an_unknown_kind_of_url_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere://x"):
        main(["read", "nowhere://x", "--output", str(tmp_path / "out")])
