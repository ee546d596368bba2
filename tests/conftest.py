"""One thread per test process: the machine has few cores, and one thread makes sums repeat bit for bit.

GPUs are hidden from every test but those marked `gpu`, which run with `-m gpu`: the others are written for the CPU, and
two-rank jobs are refused on a node with one GPU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.covering import spread_out

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accelerator-side", action="store_true",
                     help="take the accelerator's way on CPU tensors wherever the two part (mpu/device.py)")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # child processes inherit it
    if config.getoption("--accelerator-side"):  # the processes of the tests inherit it
        os.environ["MPU_ACCELERATOR_SIDE"] = "1"
    if not selects_gpu_tests(config.getoption("markexpr")):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # read when a process first uses CUDA; child processes inherit it


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a test that is marked `few(n)`, so many, from all over its list, are quick, and the rest slow."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    for several in cases.values():
        marker = several[0].get_closest_marker("few")
        assert marker is not None
        for item in spread_out(several, marker.args[0])[1]:
            item.add_marker(pytest.mark.slow)


def selects_gpu_tests(expression: str) -> bool:
    """Whether `-m expression` asks for tests marked `gpu`."""
    return re.search(r"(?<!not )\bgpu\b", expression) is not None


@pytest.fixture(autouse=True, scope="module")
def the_file_leaves_no_place() -> Iterator[None]:
    """Fixtures of a whole file may call `zero.initialize` as well."""
    with no_place_left():
        yield


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """`zero.initialize` makes one for a single rank as well, and says its place; the next test starts without."""
    with no_place_left():
        yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@contextmanager
def no_place_left() -> Iterator[None]:
    """What says the place of a rank is afterwards as it was."""
    before = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
