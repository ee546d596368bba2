"""An HTML report of training runs from their metrics files: `python -m megatron.report RUN...` (run_report.py)."""
