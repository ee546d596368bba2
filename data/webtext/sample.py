"""A small web to try the stages on: `python -m data.webtext.sample --output-dir DIR`.

No network: the pages are scenes of Jane Austen's novels (data/default_corpus.py), as a crawler might have left them:
JSON lines, some compressed, HTML files and plain text. With them come, on purpose, copies, near copies, repeated and
blacklisted addresses, foreign pages, broken encodings, and lines that are not JSON (so `--on-error strict` refuses it).
Every call writes the same bytes.
"""

from __future__ import annotations

import gzip
import html
import json
import random
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from data.cli import StrictArgumentParser, run_command
from data.default_corpus import read_novels
from data.storage import make_folder, staged_file

SEED = 1234
FOREIGN_SENTENCES = (
    "Der Kater schlief den ganzen Tag auf dem warmen Dach und kam erst am Abend zum Essen zurück. ",
    "Le marché du samedi commence tôt le matin, et les meilleures tomates sont vendues avant dix heures. ",
    "La biblioteca del barrio abre todos los días, y los niños vienen a leer después de la escuela. ",
    "Il treno per Bologna parte alle otto, ma oggi è in ritardo a causa della neve in montagna. ")
MALFORMED_LINES = (b'{"text": "this line was cut o\n', b"[1, 2, 3]\n",
                   b'{"url": "http://novels.example.org/no-text.html"}\n',
                   b'{"text": "bytes that are \xff\xfe no UTF-8", "url": "http://novels.example.org/latin.html"}\n',
                   b'{"text": "half a pair \\ud83d of surrogates"}\n', b'{"text": 17}\n', b"\0\0\0\0\n")


def html_page_of(text: str) -> str:
    """An HTML page that has the first words of the text as its title."""
    title = html.escape(" ".join(text.split()[:5]))
    paragraphs = "".join(f"<p>{html.escape(part)}</p>\n" for part in text.split("\n\n"))
    return (f"<!DOCTYPE html>\n<html><head><title>{title}</title><style>p {{ margin: 1em }}</style></head>"
            f"<body><nav><a href=/>Home</a> <a href=/index>Index</a></nav><main><h1>{title}</h1>\n"
            f"{paragraphs}</main><footer>All rights reserved</footer><script>track()</script></body></html>\n")


def url_of(text: str) -> str:
    return f"http://novels.example.org/{sha256(text.encode()).hexdigest()[:12]}.html"


def planted_documents(texts: Sequence[str], rng: random.Random) -> list[dict[str, str]]:
    """Documents that the stages should drop or change."""
    long = [text for text in texts if len(text) > 2000]
    some = rng.sample(long, min(120, len(long) // 2))
    made = [{"text": text, "url": f"http://mirror.example.net/{k}"} for k, text in enumerate(some[:40])]
    for k, text in enumerate(some[40:80]):  # near copies: one word in a hundred is replaced
        words = text.split(" ")
        for place in rng.sample(range(len(words)), len(words) // 100):
            words[place] = "edited"
        made.append({"text": " ".join(words), "url": f"http://copy.example.net/{k}"})
    made += [{"text": text + " again", "url": url_of(text)} for text in some[80:90]]
    made += [{"text": text, "url": f"http://www.youtube.com/{k}"} for k, text in enumerate(some[90:100])]
    made += [{"text": "“Curly” quotes – broken: " .encode().decode("cp1252", "replace") + text,
              "url": f"http://broken.example.net/{k}"} for k, text in enumerate(some[100:])]
    made += [{"text": sentence * rng.randint(10, 30), "url": f"http://world.example.net/{k}"}
             for k, sentence in enumerate(FOREIGN_SENTENCES * 5)]
    return made


def main(argv: Sequence[str] | None = None) -> None:
    parser = StrictArgumentParser("data.webtext.sample",
                                  "A small web to try the stages on, from Jane Austen's novels.")
    parser.add_argument("--output-dir", type=Path, required=True, metavar="DIR")
    folder = parser.parse_args(argv).output_dir
    rng = random.Random(SEED)
    texts = read_novels()
    pages, plain, rest = texts[:100], texts[100:120], texts[120:]
    records = [{"text": text, "url": url_of(text)} for text in rest] + planted_documents(rest, rng)
    rng.shuffle(records)
    lines = [json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records]
    half = len(lines) // 2
    files = {f"pages/{number:03d}.html": html_page_of(text).encode() for number, text in enumerate(pages)}
    files |= {f"pages/{number:03d}.txt": text.replace("\n", "\r\n").encode() for number, text in enumerate(plain)}
    files["crawl-0.jsonl"] = b"".join([*lines[:half], *MALFORMED_LINES])
    files["crawl-1.jsonl.gz"] = gzip.compress(b"".join(lines[half:]), mtime=0)
    make_folder(folder / "pages")
    for name, content in files.items():
        with staged_file(folder / name) as file:
            file.write(content)


if __name__ == "__main__":
    run_command(main)
