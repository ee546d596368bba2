"""Evaluation of a trained model: WikiText, LAMBADA, and perplexity by three protocols, and lm-eval's tasks.

Start at tasks.py (tasks and metrics) and scoring.py (log-likelihoods); cli.py is `python -m megatron.evaluate`,
bridge.py and harness.py connect lm-eval.
"""
