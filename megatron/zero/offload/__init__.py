"""Storage of optimizer state and parameters between their uses: on the device, on the host, or on an NVMe drive.

    storage.py         the interface (`StorageBackend`, `StoredShard`), and storage on the device
    host.py, nvme.py   storage in page-locked host memory, and in files on a drive
    copy_streams.py    device-host copies that overlap computation; gradient offload; staging buffers
    chunk_sizes.py     how large the chunks of a shard are (arithmetic without torch, shared with the planner)
    swap_dir.py, async_file.py, direct_io.py   the swap directory of a rank, its files, O_DIRECT reads and writes
    capacity_check.py  checks of host memory and NVMe before the model is built
"""
