"""The default corpus: the English documentation inside the Python, NumPy and PyTorch that run this program.

`python -m data.default_corpus --output-dir DIR` needs no network. It reads the installed `.py` files without importing
them and leaves in DIR

    corpus.jsonl             one document per topic, module docstring, function, or class with its methods
    tokenizer.model          SentencePiece trained on it
    corpus.bin, .idx, .json  the same documents as token ids
    source.json              what it was made from; written last, so its presence means complete

Documents are in the order of their hash: without repetition, mixed, and the same on every machine with the same
packages. About 9 MB, 10,000 documents and 2.5 million tokens: enough to see a small model learn.
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import sys
import sysconfig
import warnings
from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path

from data.cli import StrictArgumentParser, positive, run_command
from data.parallel import ordered_map
from data.preprocess import build_corpus
from data.storage import DataError, make_folder, read_json_or_none, staged_file, wait_for_lock, write_json_atomic
from data.tokenizer import SentencePieceTokenizer, train_sentencepiece

_ROOT = Path(__file__).resolve().parent.parent
# In the repository; an installed package uses the current folder, as for its runs.
DEFAULT_FOLDER = (_ROOT if (_ROOT / "setup.cfg").exists() else Path()) / ".cache" / "default-corpus"

PACKAGES = ("python", "numpy", "torch")
VOCAB_SIZE = 8192
REVISION = 1  # increment it when the same packages would give other documents

MIN_CHARACTERS = 80  # minimum length in characters; shorter docstrings mostly repeat the name

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

SKIPPED_FOLDERS = {"test", "tests", "testing", "site-packages", "dist-packages", "idlelib", "lib2to3", "__pycache__"}


def source_files(package: str) -> list[tuple[str, Path]]:
    """(module name, path) of an installed package, sorted, without tests."""
    prefix: tuple[str, ...] = ()
    if package == "python":
        root = Path(sysconfig.get_paths()["stdlib"])
    else:
        spec = util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise DataError(f"default corpus: package {package} is not installed")
        root, prefix = Path(spec.submodule_search_locations[0]), (package,)
    found = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        if not SKIPPED_FOLDERS.intersection(parts):
            found.append((".".join((*prefix, *parts)).removesuffix(".__init__"), path))
    return sorted(found)


def documents_in(module: tuple[str, Path]) -> list[str]:
    """The documents of one source file: the module docstring, then one per definition, methods with their class."""
    name, path = module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated escapes in third-party strings
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # templates and samples that are not Python
            return []
    if name == "pydoc_data.topics":  # the language reference of `help()`: one dict of strings
        topics = [ast.literal_eval(node.value) for node in tree.body
                  if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)]
        return [text for topic in topics for text in topic.values() if isinstance(text, str)]
    return [text for text in _docstring_entries(name, tree) if text]


def _docstring_entries(name: str, node: ast.Module | Definition) -> list[str]:
    """`name` and docstring, "" if that is too short; then one entry per definition inside, joined with its members."""
    text = ast.get_docstring(node) or ""
    members = [] if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else node.body
    return [f"{name}\n\n{text}" if len(text) >= MIN_CHARACTERS else "",
            *("\n\n".join(filter(None, _docstring_entries(f"{name}.{member.name}", member))) for member in members
              if isinstance(member, Definition))]


def collect_documents(packages: Sequence[str], workers: int) -> list[str]:
    """All distinct documents, ordered by hash."""
    modules = [module for package in packages for module in source_files(package)]
    by_hash: dict[bytes, str] = {}
    for documents in ordered_map(documents_in, modules, workers):
        for text in documents:
            raw = text.encode("utf-8", "ignore")  # a lone surrogate in an example
            by_hash[hashlib.sha256(raw).digest()] = raw.decode("utf-8")
    return [by_hash[key] for key in sorted(by_hash)]


def build_default_corpus(folder: str | Path = DEFAULT_FOLDER, vocab_size: int = VOCAB_SIZE,
                         packages: Sequence[str] = PACKAGES, workers: int = 2) -> Path:
    """Build the corpus unless it exists and was made from the same packages; returns its prefix."""
    folder = make_folder(folder)
    versions = {name: platform.python_version() if name == "python" else metadata.version(name) for name in packages}
    source = {"revision": REVISION, "packages": versions, "vocab_size": vocab_size}  # what the files depend on
    names = ("corpus.jsonl", "tokenizer.model", "corpus.bin", "corpus.idx", "corpus.json")
    with wait_for_lock(folder / ".lock"):
        is_complete = (read_json_or_none(folder / "source.json") == source
                       and all((folder / name).is_file() for name in names))
        if not is_complete:
            (folder / "source.json").unlink(missing_ok=True)
            texts = collect_documents(packages, workers)
            print(f"default corpus: {len(texts)} documents, {sum(map(len, texts)) / 1e6:.1f} MB", file=sys.stderr)
            with staged_file(folder / "corpus.jsonl", "w") as file:
                file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
            # Training sentences are paragraphs with their line ends, so that newline tokens are learnt.
            paragraphs = (f"{part}\n\n" for text in texts for part in text.split("\n\n") if part)
            train_sentencepiece(paragraphs, folder / "tokenizer.model", vocab_size)
            tokenizer = SentencePieceTokenizer(str(folder / "tokenizer.model"))
            build_corpus([folder / "corpus.jsonl"], folder / "corpus", tokenizer, workers=workers)
            write_json_atomic(folder / "source.json", source)
    return folder / "corpus"


def main(argv: Sequence[str] | None = None) -> None:
    parser = StrictArgumentParser("data.default_corpus",
                                  "Build the default corpus from the documentation of installed packages.")
    parser.add_argument("--output-dir", default=str(DEFAULT_FOLDER), metavar="DIR")
    parser.add_argument("--vocab-size", type=positive, default=VOCAB_SIZE, metavar="N")
    parser.add_argument("--workers", type=positive, default=2, metavar="N", help="processes; same output")
    args = parser.parse_args(argv)
    print(build_default_corpus(args.output_dir, args.vocab_size, workers=args.workers))


if __name__ == "__main__":
    run_command(main)
