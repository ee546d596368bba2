"""What a run is, decided once, before anything heavy is imported: no torch, no files but the JSON that is named.

optimizers.py (which optimizers there are, and what they take), tree.py (the frozen sections and presets), flags.py (the
command line), ds_keys.py and ds_file.py (DeepSpeed's JSON keys and a file of them), loose_json.py (the file's grammar).
"""
