"""How processes begin, meet, are watched and end. No torch until ranks meet.

distributed.py (who am I, and how do we meet), knock.py (wait for rank 0), alike.py (are all ranks there, and were they
told the same), exits.py (an exception -> one `error:` line and an exit code), voice.py (which rank says an error of
all), signals.py (a stop on request, with a save), leaving.py (programs that have nothing to save end on request),
streams.py (standard streams that were closed before the start), link.py (messages between launchers), pulse.py (which
of them are silent), nodes.py (how other nodes fare), meeting.py (launchers of several nodes meet), blame.py (whom the
others waited for), supervise.py (watching the ranks of a node), folders.py (their private folder, and what killed
launchers left), room.py (that there is room in it), command.py (`python -m megatron.launch`).
"""
