"""Plan a blend before training: `python -m data.mix 0.7 A 0.3 B --tokens 1e9 --output mixture.yaml`.

Takes what `--train-data` takes, of corpora, prints how often a budget of tokens reads each source, and refuses one that
reads a source more often than allowed. `--train-data mixture.yaml` trains on the written file, with the same limits.
"""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from data.cli import StrictArgumentParser, positive, run_command
from data.gpt2_dataset import GPT2Dataset
from data.indexed import IndexedCorpus
from data.sampling import parse_split, split_documents
from data.sources import (MIXTURE_SUFFIXES, NAMED_CORPORA, Source, check_epochs, named_corpus, parse_sources,
                          positive_number, samples_per_source)
from data.storage import UsageError, staged_file


def training_sizes(sources: Sequence[Source], split: str, seq_length: int) -> list[int]:
    """The samples of each corpus in its training part."""
    sizes, shares = [], parse_split(split)
    for source in sources:
        corpus = IndexedCorpus(named_corpus(source.name) if source.name in NAMED_CORPORA else source.name)
        documents, *_ = split_documents(shares, corpus.num_documents)
        sizes.append(GPT2Dataset(corpus, documents, seq_length, 0, "train").samples_per_epoch)
    return sizes


def mixture_table(sources: Sequence[Source], sizes: Sequence[int], samples: int, seq_length: int) -> str:
    """What a run of `samples` reads of each source."""
    rows = [("source", "tokens", "weight", "share", "tokens read", "epochs", "allowed")]
    for source, size, own in zip(sources, sizes, samples_per_source(sources, sizes, samples), strict=True):
        weight, allowed = ("" if number is None else f"{float(number):g}" for number in source[1:])
        rows.append((source.name, f"{size * seq_length:,}", weight or "size", f"{float(own / samples):.2%}",
                     f"{int(own) * seq_length:,}", f"{float(own / size):.2f}", allowed or "any"))
    rows.append(("all", f"{sum(sizes) * seq_length:,}", "", "100.00%", f"{samples * seq_length:,}", "", ""))
    first, *widths = (max(map(len, column)) for column in zip(*rows))
    return "\n".join("  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)]).rstrip() for row in rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = StrictArgumentParser("data.mix", "Show how often a number of tokens reads each source of a blend.")
    parser.add_argument("sources", nargs="+", metavar="SOURCE",
                        help="prefixes of corpora, weights and prefixes in turn, or a mixture file")
    parser.add_argument("--tokens", type=positive_number, metavar="N",
                        help="tokens of the run: iterations x global batch x sequence length (default: all there are)")
    parser.add_argument("--max-epochs", type=positive_number, metavar="N",
                        help="how often a run may read a source, unless the mixture file says it (default: any)")
    parser.add_argument("--split", default="949,50,1", help="as for training, which reads the first part")
    parser.add_argument("--seq-length", type=positive, default=1024, metavar="N", help="default: 1024")
    parser.add_argument("--output", metavar="FILE.yaml", help="write the mixture file, for --train-data")
    args = parser.parse_args(argv)
    if args.output and not args.output.endswith(MIXTURE_SUFFIXES):
        raise UsageError(f"--output {args.output}: expected a name that ends in {' or '.join(MIXTURE_SUFFIXES)}")
    sources = [source._replace(max_epochs=source.max_epochs or args.max_epochs)
               for source in parse_sources(args.sources, "")]
    sizes = training_sizes(sources, args.split, args.seq_length)
    samples = max(1, int(args.tokens / args.seq_length)) if args.tokens else sum(sizes)
    print(mixture_table(sources, sizes, samples, args.seq_length), flush=True)
    check_epochs(sources, sizes, samples, args.seq_length)
    if args.output:
        rows = [{key: value if key == "name" else float(value) for key, value in source._asdict().items()
                 if value is not None} for source in sources]
        with staged_file(args.output, "w") as file:
            yaml.safe_dump({"sources": rows}, file, sort_keys=False, allow_unicode=True)


if __name__ == "__main__":
    run_command(main)
