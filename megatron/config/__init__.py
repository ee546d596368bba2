"""The configuration of a run: frozen dataclasses, decided before anything slow is imported. No torch.

Begin with schema.py (how a field is declared), then tree.py (the whole Config). Sections are in *_config.py, flags in
cli.py, DeepSpeed's JSON in ds_json.py.
"""

from megatron.config.tree import *  # noqa: F401,F403
