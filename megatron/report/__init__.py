"""A picture of runs: `python -m megatron.report RUN...` makes one page of curves from what training has written.

    source.py       what was typed -> a metrics file
    read.py         a metrics file -> its records, whatever state it was left in
    history.py      records -> one line of steps: what a resume repeated counts once
    charts.py       histories -> what the page draws: curves of as many points as it can show, with every peak
    tables.py       histories -> figures, differences of configuration, starts
    page.py         all of it -> one file of HTML, with page.css and page.js (which draws)
    command.py      `python -m megatron.report`

No torch and no numpy: the command answers at once. Not here: writing metrics (train/log.py).
"""
