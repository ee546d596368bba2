"""Web pages to a corpus: `python -m data.webtext`.

A *stage* reads documents and writes those it keeps, perhaps changed, into a folder of *shards* (`part-00000.jsonl`,
...) with a `stage.json` that is written last. A *map stage* processes documents one by one (`urls`, `extract`, `clean`,
`language`, `quality`, `decontaminate`); a *global stage* all of them (`dedup`, `shuffle`, `split`). Both are maps over
shards that an engine runs (engines.py); global stages exchange rows between them through files (exchange.py), so memory
does not grow with the corpus. Begin with documents.py and runner.py (one stage), then __main__.py (all of them in
order); the stages are in filters.py (`urls`, `clean`, `language`, `decontaminate`), extract.py, quality.py, dedup.py
(with `unique`) and split.py (with `shuffle`).
"""
