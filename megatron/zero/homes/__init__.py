"""Where shards live when they are not on the device, below the engine: nothing here knows a bucket or a step.

swapfolder.py (one rank's own folder on a drive), blockfile.py (positioned reads and writes past the page cache),
memory.py (host buffers that a disk and a device can both reach into), lanes.py (threads that read and write),
tilefile.py (checksummed tiles at fixed places of one file), preflight.py (whether a drive will do, before the model is
built).
"""
