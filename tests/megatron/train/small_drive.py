"""pretrain_gpt2.py with tensorboard's files on a drive that is full soon: `small_drive.py FLAGS...`."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

from tensorboard.compat.tensorflow_stub.io.gfile import LocalFileSystem

import pretrain_gpt2
from megatron.distributed.exit_codes import run
from megatron.distributed.signals import StopListener

ROOM = 8192


def append(self: LocalFileSystem, filename: bytes, content: bytes, binary_mode: bool = False,
           before: Any = LocalFileSystem.append) -> None:
    left = ROOM - os.path.getsize(filename)
    before(self, filename, content[:max(0, left)], binary_mode)
    if len(content) > left:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), filename)


if __name__ == "__main__":
    LocalFileSystem.append = append
    sys.exit(run(lambda: pretrain_gpt2.main(StopListener().listen()), is_job=True))
