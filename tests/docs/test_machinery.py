"""The reader and the comparison themselves: each can fail."""

from __future__ import annotations

import pytest

from tests.docs.compare import Comparison
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
    assert stray_commands("text\n\n    python x.py\n    a formula\n\n```bash\n    python y.py\n```") == ["python x.py"]
    assert links("a [b](c.md#d-e) `[x](y)`")[0] == (1, "c.md#d-e")
    assert anchors("## What a run tells\n### `mpu`, alone\n") == {"what-a-run-tells", "mpu-alone"}


def test_a_page_off_the_convention_is_refused() -> None:
    for page in ("<!-- docs-test: skip -->\n```bash\nls\n```", "<!-- docs-test: needs -->\n```bash\nls\n```",
                 "```\nls\n```", "```console\n$ ls\n```", "```text\nnobody printed this\n```", "```bash\nls\n"):
        with pytest.raises(PageError):
            blocks(page)


def test_what_may_differ() -> None:
    for shown, same, other in (
            ("lm loss 8.398036E+00 |", "lm loss 8.401E+00 |", "lm loss 8.498E+00 |"),
            ("iteration 10/ 20", "iteration 10/ 20", "iteration 11/ 20"),
            ("(1.6 MB in 0.36 s)", "(1.6 MB in 12 s)", "(1.9 MB in 0.36 s)"),
            ("time (ms): 38.9 | tokens/s 6584", "time (ms): 1.2 | tokens/s 9", "time (ms): 1.2 | tokens 9"),
            ("1561616 bytes", "1563522 bytes", "1763522 bytes"),
            ("saved ... to runs/a", "saved global_step3 to runs/a", "saved global_step3 to runs/b"),
            ("saved .../runs/a", "saved /home/me/runs/a", "saved home/b"),
            ("a\n...\nd", "a\nb\nc\nd", "a\nd\ne"), ("...\nb\n...\nb", "b\nb", "b"), ("a\nd", "a\n\nd", "a\nb\nd"),
            ("CPU, 2 threads: fine", "CPU, 1 thread: fine", ""), ("", "", "a")):
        assert Comparison().difference(shown, same) is None
        assert Comparison().difference(shown, other) is not None


def test_a_checksum_may_be_another_but_the_same_stays_the_same() -> None:
    page = Comparison()
    assert page.difference(f"total {A}", f"total {B}") is None
    assert page.difference(f"total {A[:12]}...", f"total {B}") is None, "the same, cut short"
    assert page.difference(f"total {A[:12]}...", f"total {C}") is not None
    assert page.difference(f"total {A}", f"total {C}") is not None
    other = Comparison()
    assert other.difference(f"{A}\n{B}", f"{C}\n{C}") is not None, "two of the page are one here"
