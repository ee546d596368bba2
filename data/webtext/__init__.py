"""From pages of the web to a corpus: `python -m data.webtext`.

A *stage* reads documents and writes those it keeps, perhaps changed, into a folder of *shards* (`part-00000.jsonl`,
...) with a `stage.json` that is written last. A *map stage* looks at one document at a time (`urls`, `extract`,
`clean`, `language`, `decontaminate`); a *global stage* at all of them (`dedup`, `shuffle`, `split`) with files of its
own, so memory does not grow with the corpus. From below upwards:

    document, counts    what travels between stages; how many, and why not more
    inputs, reading     files of any kind -> work of equal size -> documents, or what is wrong with a line
    runner              one stage: workers, what is kept, what was done already
    urls, extract, clean, language, dedup, ...   the stages
    report, pipeline    what happened; all stages in order
"""
