"""Every command and example of every page is run, and prints what the page shows (minutes: run by test_slow.sh)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.reader import PAGES, ROOT, blocks
from tests.docs.session import Session, follow

WITH_SOMETHING_TO_RUN = [path for path in PAGES if any(not block.skip for block in blocks(path.read_text()))]


@pytest.mark.slow
@pytest.mark.parametrize("path", WITH_SOMETHING_TO_RUN, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_page_says_is_what_happens(path: Path, tmp_path: Path) -> None:
    session = Session(tmp_path)
    try:
        wrong = [complaint for _, _, complaint in follow(session, path.read_text()) if complaint]
    finally:
        session.close()
    assert not wrong, "\n\n".join(wrong)
