"""Storage of optimizer state and parameters between their uses: on the device, on the host, or on an NVMe drive.

Begin with storage.py (the interface, and storage on the device and the host), then nvme.py. copy_streams.py copies
between device and host beside the computation, chunk_sizes.py is arithmetic without torch that the planner shares,
swap_drive.py and direct_io.py are the files on a drive.
"""
