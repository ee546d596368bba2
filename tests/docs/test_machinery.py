"""The reader, the comparison and the flag check themselves: each can fail."""

from __future__ import annotations

import pytest

from tests.docs.compare import Comparison, match_line
from tests.docs.programs import INSTALLED, commands, complaint, console_commands
from tests.docs.reader import PageError, anchors, blocks, links, stray_commands

A, B, C = "ab12" * 16, "cd34" * 16, "ef56" * 16


def test_a_page_is_read_in_order_with_files_and_reasons() -> None:
    page = ("# T\n\n```python example.py\nx = 1\n```\n\n"
            "```bash\npython example.py\n```\n\nprints\n\n```text\nhello\n```\n"
            "<!-- docs-test: skip needs 8 GPUs -->\n```bash\npython big.py\n```\n"
            "<!-- docs-test: needs ftfy, py3langid -->\n```bash\npython web.py\n```\n")
    first, second, third, fourth = blocks(page)
    assert (first.file, first.language, first.text) == ("example.py", "python", "x = 1")
    assert (second.prints, second.skip, second.line) == ("hello", "", 7)
    assert (third.prints, third.skip) == (None, "needs 8 GPUs")
    assert (fourth.skip, fourth.needs) == ("", ("ftfy", "py3langid"))


@pytest.mark.parametrize("page", [
    "<!-- docs-test: skip -->\n```bash\nls\n```",
    "<!-- docs-test: skip-->\n```bash\nls\n```",
    "<!-- docs-test: needs -->\n```bash\nls\n```",
    "<!-- docs-test: ignore it -->\n```bash\nls\n```",
    "```\nls\n```",
    "```console\n$ ls\n```",
    "```text\nnobody printed this\n```",
    "```bash\nls\n",
])
def test_a_page_off_the_convention_is_refused(page: str) -> None:
    with pytest.raises(PageError):
        blocks(page)


def test_commands_in_indented_blocks_are_found() -> None:
    page = "text\n\n    python x.py\n    a formula\n\n```bash\n    python y.py\n```\n"
    assert stray_commands(page) == ["python x.py"]


@pytest.mark.parametrize("shown, printed, same", [
    ("loss 5.44", "loss 5.45", True),
    ("loss 5.44", "loss 5.54", False),
    ("lm loss 8.398036E+00 |", "lm loss 8.401E+00 |", True),
    ("lm loss 8.398036E+00 |", "lm loss 8.498E+00 |", False),
    ("iteration 10/ 20", "iteration 10/ 20", True),
    ("iteration 10/ 20", "iteration 11/ 20", False),
    ("iteration 10/ 20", "iteration 10/ 21", False),
    ("(1.6 MB in 0.36 s)", "(1.6 MB in 12 s)", True),
    ("(1.6 MB in 0.36 s)", "(1.9 MB in 0.36 s)", False),
    ("time (ms): 38.9 | tokens/s 6584", "time (ms): 1.2 | tokens/s 9", True),
    ("1561616 bytes", "1563522 bytes", True),
    ("1561616 bytes", "1763522 bytes", False),
    ("4 files", "5 files", False),
    ("grad norm...", "grad norm 1.0 | tokens/s 3", True),
    ("saved ... to runs/a", "saved global_step3 to runs/a", True),
    ("saved ... to runs/a", "saved global_step3 to runs/b", False),
    ("saved .../runs/a", "saved runs/a", True),
    ("saved .../runs/a", "saved /home/me/runs/a", True),
    ("saved .../runs/a", "saved home/b", False),
    ("loss 1.0", "loss nan", False),
    ("1,557,611,200 parameters", "1,557,611,200 parameters", True),
    ("1,557,611,200 parameters", "1,557,611,201 parameters", False),
    ("tensor([-0.0061, 0.0222])", "tensor([-0.0061, 0.0223])", True),
    ("tensor([-0.0061, 0.0222])", "tensor([-0.0081, 0.0222])", False),
])
def test_lines(shown: str, printed: str, same: bool) -> None:
    assert (match_line(shown, printed) is not None) is same


@pytest.mark.parametrize("shown, printed, same", [
    ("a\n...\nd", "a\nb\nc\nd", True),
    ("a\n...\nd", "a\nd", True),
    ("a\n...\nd", "a\nd\ne", False),
    ("a\nd", "a\nb\nd", False),
    ("...", "", True),
    ("a", "", False),
    ("", "a", False),
    ("...\nb\n...\nb", "b", False),
    ("a   b\n\n", "a b", True),
    ("CPU, 2 threads: fine", "CPU, 1 thread: fine", True),
])
def test_lines_left_out(shown: str, printed: str, same: bool) -> None:
    assert (Comparison().difference(shown, printed) is None) is same


def test_a_checksum_may_be_another_but_the_same_stays_the_same() -> None:
    page = Comparison()
    assert page.difference(f"total {A}", f"total {B}") is None
    assert page.difference(f"total {A[:12]}...", f"total {B}") is None, "the same, cut short"
    assert page.difference(f"total {A[:12]}...", f"total {C}") is not None
    assert page.difference(f"total {A}", f"total {C}") is not None
    other = Comparison()
    assert other.difference(f"{A}\n{B}", f"{C}\n{C}") is not None, "two of the page are one here"


def test_commands_are_found_in_pipes_loops_and_behind_variables() -> None:
    script = ("for s in 0 1; do\n    NNODES=2 python a.py --stage $s \\\n        --x > /dev/null\ndone\n"
              "cd runs && python b.py | head -n 1  # why\n")
    assert commands(script) == [["python", "a.py", "--stage", "0", "--x"], ["cd", "runs"], ["python", "b.py"],
                                ["head", "-n", "1"]]


@pytest.mark.parametrize("command, accepted", [
    ("python pretrain_gpt2.py --preset tiny --train_iters 5", True),
    ("python pretrain_gpt2.py --preset tiny --train-itres 5", False),
    ("python pretrain_gpt2.py --preset huge", False),
    ("python -m megatron.launch --nproc-per-node 2 pretrain_gpt2.py --zero-stage 2", True),
    ("python -m megatron.launch --nproc-per-node 2 pretrain_gpt2.py --zero-stage two", False),
    ("python -m megatron.launch --nproc 2 pretrain_gpt2.py", False),
    ("python -m megatron.plan --preset 1.5B --ranks 8", True),
    ("python -m megatron.plan --preset 1.5B --rank 8", False),
    ("python -m megatron.checkpoint list runs/a", True),
    ("python -m megatron.checkpoint lost runs/a", False),
    ("gpt2-plan --preset 1.5B --ranks 8", True),
    ("gpt2-plan --preset 1.5B --rank 8", False),
    ("python -m data.preprocess --input a.jsonl --output-prefix b", True),
    ("python -m data.preprocess --inputs a.jsonl --output-prefix b", False),
    ("python -m data.webtext dedup a --output b --shard 0/4", True),
    ("python -m data.webtext dedup a --output b --shards 0/4", False),
    ("bash scripts/pretrain_gpt2.sh --train-iters 20", True),
    ("bash scripts/pretrain_gpt2.sh --train-it 20", False),
    ("bash scripts/pretrain_gpt2.sh --dry-run --tflops 40", True),
    ("bash scripts/pretrain_gpt2.sh --tflops 40", False),
    ("bash scripts/nowhere.sh", False),
    ("python -m megatron.nowhere", False),
    ("pyhton pretrain_gpt2.py", False),
])
def test_flags_are_those_of_the_program(command: str, accepted: bool) -> None:
    said = complaint(commands(command)[0])
    assert (said is None) is accepted, said


def test_the_installed_commands_are_known() -> None:
    assert set(INSTALLED) == set(console_commands())


def test_links_and_anchors() -> None:
    assert links("a [b](c.md#d-e) `[x](y)`")[0] == (1, "c.md#d-e")
    assert anchors("## What a run tells\n### `mpu`, alone\n") == {"what-a-run-tells", "mpu-alone"}
