"""Where what lasts of the shards is kept: on the device, on the host, on an NVMe drive.

shelf.py says what a home is to the engine; here.py is the device, host.py the host beside it, streamed.py a host whose
parts come to the device for a step, nvme.py a drive (used.py counts what it costs), parts.py how large its parts are.
Between a device and its host is ferry.py: by it gradients come down (descent.py) and new weights go to the other side
(passing.py).
Below nvme.py nothing knows a bucket or a step: memory.py (host buffers that a disk and a device can both reach into),
words.py (bytes, times and refusals in words), swapfolder.py (one rank's own folder on a drive), blockfile.py
(positioned reads and writes past the page cache), lanes.py (the threads that make them), tilefile.py (checksummed tiles
at fixed places of one file), preflight.py (whether a drive will do, before the model is built; room.py asks the same of
the host).
"""
