"""An HTML report of training runs from their metrics files: `python -m megatron.report RUN...`. Needs no torch and no
numpy.

history.py reads a metrics file, page.py makes the page (drawn by page.js).
"""
