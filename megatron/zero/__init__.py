"""The ZeRO engine: one data-parallel mechanism whose stages are rows of a table (policy.py).

Floor by floor: layout.py (what lives where), policy.py (what is split), bucket.py (the buffers of one unit), hooks.py
(module events -> bucket calls), engine.py (what a training loop sees).
"""
