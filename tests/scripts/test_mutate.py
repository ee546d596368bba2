"""scripts/mutate.py on a repository of one function, whose test sees one of its two mutants."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_of_two_mutants_one_is_killed_and_one_survives(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    for name, text in (("product/add.py", "def add(a, b):\n    return a + b\n"),
                       ("tests/test_add.py", "from product.add import add\ndef test(): assert add(2, 0) == 2\n")):
        (repository / name).parent.mkdir(parents=True)
        (repository / name).write_text(text)
    for command in (["init", "--quiet"], ["add", "."],
                    ["-c", "user.name=test", "-c", "user.email=test", "commit", "--quiet", "--message", "all"]):
        subprocess.run(["git", *command], cwd=repository, check=True)

    def mutate(*arguments: str) -> str:
        done = subprocess.run([sys.executable, str(ROOT / "scripts" / "mutate.py"), *arguments], cwd=repository,
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    mutate("record", "--output", "calls.jsonl")
    recorded = json.loads((repository / "calls.jsonl").read_text())
    assert recorded["test"] == "tests/test_add.py" and "product/add.py:add" in recorded["calls"]
    assert mutate("record", "--output", "calls.jsonl") == "", "all is recorded"
    said = mutate("run", "--calls", "calls.jsonl", "--packages", "product", "--output", "mutants.jsonl")
    lines = (repository / "mutants.jsonl").read_text().splitlines(keepends=True)
    found = {line["after"]: line["killed_by"] for line in map(json.loads, lines)}
    assert found == {"return None": "tests/test_add.py", " - ": ""}
    (repository / "mutants.jsonl").write_text(lines[0])  # an earlier call stopped after the first
    mutate("run", "--calls", "calls.jsonl", "--packages", "product", "--output", "mutants.jsonl")
    assert (repository / "mutants.jsonl").read_text().splitlines(keepends=True) == lines
    assert "1 of 2 killed" in said and "'return a + b' -> 'return None': tests/test_add.py" in said
