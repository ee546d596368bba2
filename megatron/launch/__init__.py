"""How processes begin, meet, are watched and end. No torch until ranks meet.

distributed.py (who am I, and how do we meet), exits.py (an exception -> one `error:` line and an exit code), voice.py
(which rank says an error of all), signals.py (a stop on request), streams.py (standard streams that were closed before
the start), supervise.py (watching the ranks of a node), command.py (`python -m megatron.launch`).
"""
