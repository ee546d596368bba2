"""Evaluation of a trained model: WikiText, LAMBADA, HellaSwag and perplexity by three protocols, and lm-eval's tasks.

Start at task.py (task interface and metrics) and scoring.py (log-likelihoods); cli.py is `python -m
megatron.evaluate`, bridge.py and harness.py connect lm-eval.
"""
