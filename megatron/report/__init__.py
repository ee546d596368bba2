"""An HTML report of training runs from their metrics files: `python -m megatron.report RUN...`.

history.py reads a metrics file, page.py makes the page (drawn by page.js). Needs no torch and no numpy.
"""
