"""The reference pages say what the declarations say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SPEC = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "reference.py")
assert SPEC is not None and SPEC.loader is not None
reference = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(reference)


@pytest.mark.parametrize("page", sorted(reference.pages()), ids=lambda page: page.name)
def test_a_reference_page_equals_the_declarations(page: Path) -> None:
    assert page.read_text() == reference.pages()[page], "run python scripts/reference.py"


def test_every_flag_is_in_the_reference() -> None:
    flags = (ROOT / "docs" / "flags.md").read_text()
    for name in reference.FIELDS:
        assert f"`{reference.flag_name(name)}`" in flags, name
