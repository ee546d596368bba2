"""From pages of the web to a corpus: `python -m data.webtext`.

A *stage* reads documents and writes those it keeps, perhaps changed, into a folder of *shards* (`part-00000.jsonl`,
...) with a `stage.json` that is written last. A *map stage* looks at one document at a time (`urls`, `extract`,
`clean`, `language`, `decontaminate`); a *global stage* at all of them (`dedup`, `shuffle`, `split`) with files of its
own, so memory does not grow with the corpus. From below upwards:

    document.py, counts.py                what travels between stages; how many, and why not more
    inputs.py, jsonarray.py, reading.py   files of any kind -> work of equal size -> documents, or what is wrong where
    charset.py (prescan.py, legacy.py)    HTML of any character set -> text, as browsers do
    record.py, folder.py, shards.py       `stage.json`, the folder of a stage, the lines in it
    runner.py                             one stage: workers, what is kept, what was done already
    external.py, words.py, minhash.py, signatures.py, near.py    large sorts, n-grams, near copies
    urls.py, extract.py, clean.py, language.py (codes.py), dedup.py,
    decontaminate.py, shuffle.py, split.py    the stages
    flags.py, report.py, pipeline.py      their flags; what happened; all stages in order
    sample.py                             a small web to try them on
"""
