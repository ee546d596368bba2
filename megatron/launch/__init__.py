"""How processes begin, meet, are watched and end. No torch until ranks meet.

distributed.py (who am I, and how do we meet), alike.py (are all ranks there, and were they told the same), exits.py
(standard streams; an exception -> one `error:` line and an exit code), voice.py (which rank says an error of all),
signals.py (a stop on request, with a save), leaving.py (programs that have nothing to save end on request), link.py
(messages between launchers), pulse.py (which of them are silent), nodes.py (how other nodes fare), meeting.py
(launchers of several nodes meet), blame.py (whom the others waited for), supervise.py (watching the ranks of a node),
folders.py (their private folder, and what killed launchers left), command.py (`python -m megatron.launch`).
"""
