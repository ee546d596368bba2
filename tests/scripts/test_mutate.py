"""scripts/mutate.py: which mutants a file has, and that a test that calls the function kills one."""

from __future__ import annotations

from pathlib import Path

from scripts import mutate

SOURCE = b'''
def f(x: int = 1, note="a + b"):
    """Text + text."""
    if x < 3 and not note:
        raise ValueError(f"{x + 1}")
    total = x // 2
    total += 1
    print(total)
    return total
'''


def test_mutants_change_code_and_neither_texts_nor_declarations() -> None:
    found = {(mutant.before, mutant.after) for mutant in mutate.mutants_of("f.py", SOURCE)}
    assert found == {("x < 3 and not note", "(not (x < 3 and not note))"), (" and ", " or "), (" < ", " <= "),
                     ("3", "4"), ('raise ValueError(f"{x + 1}")', "pass"), (" // ", " * "), ("2", "3"),
                     ("total += 1", "pass"), ("1", "2"), ("print(total)", "pass"), ("return total", "return None")}
    assert all(mutant.function == "f" for mutant in mutate.mutants_of("f.py", SOURCE))


def test_a_draw_is_that_of_its_seed() -> None:
    root = Path(__file__).resolve().parents[2]
    first, again, other = (mutate.draw(root, ["mpu"], 20, seed) for seed in (1, 1, 2))
    assert first == again != other and all(mutant.path.startswith("mpu/") for mutant in first)


def test_a_mutant_is_killed_by_a_test_that_fails_and_the_file_is_restored(tmp_path: Path) -> None:
    product, test = tmp_path / "f.py", tmp_path / "test_f.py"
    product.write_bytes(SOURCE)
    test.write_text("from f import f\n\ndef test_f():\n    assert f(4) == 3\n")
    recorded: dict[str, dict[str, object]] = {"seconds": {"test_f.py": 1.0}, "calls": {"f.py:f": ["test_f.py"]}}
    outcome = {(mutant.before, mutant.after): mutate.judge(tmp_path, mutant, recorded, 60)
               for mutant in mutate.mutants_of("f.py", SOURCE) if mutant.line >= 8}
    assert outcome == {("print(total)", "pass"): "", ("return total", "return None"): "test_f.py"}
    assert product.read_bytes() == SOURCE
