"""Who a process is among the ranks, which device it gets, and what it says when the ranks cannot meet."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron.distributed import process_group
from megatron.distributed.preflight import check_ranks_match
from megatron.distributed.process_group import Environment, device_for, interface_towards
from megatron.errors import ConfigError
from mpu.store import StoreKV
from tests.distributed import run_ranks
from tests.megatron.helpers import TINY, lines, records, total_digest, train_all
from tests.megatron.launch.processes import error_of, launched, python

LAUNCHED_BY = ("MEGATRON_LAUNCHER", "TORCHELASTIC_RUN_ID")


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of a process that no launcher has started."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MEGATRON_STORE_FILE", *LAUNCHED_BY):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        yield taken.getsockname()[1]


def test_a_port_in_use_is_a_config_error_that_names_it(busy_port: int, environ: pytest.MonkeyPatch) -> None:
    address = socket.gethostname()
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": address, "MASTER_PORT": busy_port}.items():
        environ.setenv(name, str(value))
    with pytest.raises(ConfigError, match=f"port {busy_port} .* in use.*--master-port.*MASTER_PORT"):
        process_group.init_process_group(timeout_seconds=5)
    assert not torch.distributed.is_initialized()


def test_a_port_in_use_ends_the_launcher_with_exit_2(busy_port: int) -> None:
    done = python("-m", "megatron.launch", "--nnodes", 2, "--node-rank", 0, "--master-addr", socket.gethostname(),
                  "--master-port", busy_port, "pretrain_gpt2.py")
    assert f"port {busy_port}" in error_of(done, 2)


# ---- devices -----------------------------------------------------------------------------------------------------


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_each_rank_has_the_gpu_of_its_local_number(environ: pytest.MonkeyPatch) -> None:
    gpus(environ, 4)
    assert [device_for(Environment(4 + k, k, 8, 4)).index for k in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="rank 4 needs GPU 4, but this node has 4"):
        device_for(Environment(4, 4, 8, 8))


@pytest.mark.parametrize("variables, is_its_own", [
    ({"SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0"}, True),  # srun --gpus-per-task=1
    ({"CUDA_VISIBLE_DEVICES": "3"}, True),  # by a wrapper
    ({"CUDA_VISIBLE_DEVICES": "0"}, False),  # srun -n4, or mpirun, on a node with one GPU
    *(({launcher: "1"}, False) for launcher in LAUNCHED_BY)])
def test_the_only_gpu_that_a_rank_sees_is_its_own_or_is_not_shared(variables, is_its_own, environ):
    gpus(environ, 1)
    for name, value in variables.items():
        environ.setenv(name, value)
    assert device_for(Environment(0, 0, 2, 2)).index == device_for(Environment(1, 1, 2, 2), "gloo").index == 0
    with nullcontext() if is_its_own else pytest.raises(ConfigError, match="rank 1 needs GPU 1, but this node has 1"):
        assert device_for(Environment(1, 1, 2, 2)).index == 0


@pytest.mark.parametrize("ranks, given, cpus", [(4, 8, {0, 1, 6}), (4, 3, None), (2, 8, None)])
def test_ranks_of_all_gpus_run_on_the_cpus_near_their_own(ranks: int, given: int, cpus: set[int] | None,
                                                          environ: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Unless fewer CPUs were given to them, or they do not use all GPUs and may crowd on one node."""
    bound, folder = list[set[int]](), tmp_path / "0000:db:00.0"
    gpus(environ, 4)
    folder.mkdir()
    (folder / "local_cpulist").write_text("0-1,6\n")
    where = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xdb, pci_device_id=0)
    for module, name, found in (
            (torch.cuda, "set_device", lambda device: None),
            (torch.cuda, "get_device_properties", lambda device: where),
            (dist, "is_initialized", lambda: True), (os, "cpu_count", lambda: 8), (process_group, "PCI", tmp_path),
            (process_group, "register_shutdown_at_exit", lambda: None),
            (os, "sched_getaffinity", lambda who: {*range(given)}),
            (os, "sched_setaffinity", lambda who, cpus: bound.append({*cpus}))):
        environ.setattr(module, name, found)
    process_group.init_process_group(Environment(1, 1, ranks, ranks), "nccl")
    assert bound == ([] if cpus is None else [cpus])


ROUTES = """Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT
eth0 00000000 0101A8C0 0003 0 0 100 00000000 0 0 0
wlan0 00000000 0101A8C0 0003 0 0 600 00000000 0 0 0
eth0 0001A8C0 00000000 0001 0 0 100 00FFFFFF 0 0 0
ib0 0000000A 00000000 0001 0 0 0 0000FFFF 0 0 0
"""


def test_gloo_takes_the_interface_on_the_way_to_rank_0(environ: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And never the loopback interface that Debian gives the name of a machine."""
    environ.setattr(process_group, "ROUTES", tmp_path / "routes")
    assert interface_towards("10.0.0.7") is None
    (tmp_path / "routes").write_text(ROUTES)
    found = [interface_towards(address) for address in ("10.0.0.7", "192.168.1.9", "127.0.1.1", "no.invalid")]
    assert found == ["ib0", "eth0", "eth0", None]


@pytest.mark.parametrize("backend, shared", [("gloo", True), ("cuda:gloo", True), ("cpu:gloo", False)])
def test_ranks_that_have_met_over_gloo_share_a_gpu(backend: str, shared: bool, environ: pytest.MonkeyPatch) -> None:
    """Where GPUs' tensors travel by it."""
    gpus(environ, 1)
    environ.setenv(LAUNCHED_BY[0], "1")
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with nullcontext() if shared else pytest.raises(ConfigError, match="rank 1 needs GPU 1"):
            assert device_for(Environment(1, 1, 2, 2)).index == 0
    finally:
        torch.distributed.destroy_process_group()


# ---- leaving -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("end", "left"), [("", "False"), ("raise ValueError", "True")])
def test_a_script_that_just_ends_leaves_the_process_group_unless_it_failed(end: str, left: str) -> None:
    program = ("import atexit, torch; atexit.register(lambda: print(torch.distributed.is_initialized()));"
               f"from megatron.zero import init_distributed; init_distributed(); {end}")
    done = python("-c", program)
    assert done.stdout.strip() == left, done.stderr


ENGINE_THAT_LIVES_ON = """
import atexit, os, torch
atexit.register(lambda: print(*(open(f"/proc/self/task/{task}/comm").read().strip()
                                for task in os.listdir("/proc/self/task")), sep=chr(10), flush=True))
from megatron import zero
zero.init_distributed()
import torch._dynamo  # which imports torch.distributed.nn
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
engine, *_ = zero.initialize(model=model, model_parameters=model.parameters(), config={
    "train_batch_size": 2, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 3}})
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()
"""


def test_a_script_that_just_ends_leaves_no_thread_of_a_process_group_behind(tmp_path: Path) -> None:
    """A thread that drops a tensor while the interpreter ends aborts the process: `terminate called without an active
    exception`. Destroying a group joins its threads, unless something still holds the group."""
    script = tmp_path / "script.py"
    script.write_text(ENGINE_THAT_LIVES_ON)
    done = launched(2, script)
    names = done.stdout.split()
    assert done.returncode == 0 and len(names) >= 2, done.stderr
    assert not [name for name in names if "gloo" in name]


def test_the_store_ends_with_rank_0_where_no_launcher_keeps_it() -> None:
    for environ, keeps in (({"RANK": "0"}, True), ({"RANK": "1"}, False),
                           ({"RANK": "0", "MEGATRON_STORE_FILE": "x"}, False),
                           ({"RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}, False)):
        assert process_group.hosts_store({"WORLD_SIZE": "2", **environ}) == keeps


MEETS = """
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 256))
from megatron.distributed import process_group
process_group.init_process_group(process_group.Environment(), "gloo", even_for_one_rank=True)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], os.environ["TORCH_GLOO_LAZY_INIT"])
"""


def test_a_rank_connects_on_demand_and_may_open_all_it_is_allowed():
    program = python("-c", MEETS)
    assert program.stdout.split() == ["256", "1"], program.stderr


# ---- restarts by torchrun --------------------------------------------------------------------------------------------

DIES = """
import os, pathlib, signal, sys
import pretrain_gpt2
from megatron.train.loop import Trainer
HOW, MARK, TIMES = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
del sys.argv[1:4]
taken = Trainer.train_step
def dies(trainer, batches):
    died = MARK.read_text() if MARK.exists() else ""
    if os.environ["RANK"] == "1" and trainer.engine.global_steps == 4 and len(died) < TIMES:
        MARK.write_text(died + "x")
        if HOW == "raises":
            raise ValueError("once")
        os._exit(3) if HOW == "exits" else os.kill(os.getpid(), signal.SIGKILL)
    return taken(trainer, batches)
Trainer.train_step = dies
sys.exit(pretrain_gpt2.program())
"""


def test_ranks_that_are_started_again_do_not_meet_those_from_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the store that torchrun keeps over a restart."""
    server = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    place = process_group.Environment(rank=0, world_size=1)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "RANK": "0", "WORLD_SIZE": "1",
                        "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MEGATRON_STORE_FILE", raising=False)
    for restart in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        check_ranks_match(process_group._open_store(place, timedelta(seconds=5)), 0, 1, {}, timedelta(seconds=5))


@pytest.mark.slow
@pytest.mark.parametrize(("how", "times"), [("raises", 1), ("is killed", 2), ("is killed", 3)])
def test_a_job_under_torchrun_goes_on_after_a_rank_dies(how: str, times: int, tmp_path: Path) -> None:
    """As often as torchrun starts it again: twice."""
    flags = [*TINY, "--mock-data", "--batch-size", 2, "--zero-stage", 2, "--train-iters", 8, "--save-interval", 2]
    run_ranks(train_all, 2, [[*flags, "--save", tmp_path / "whole", "--metrics-file", tmp_path / "whole.jsonl"]])
    (tmp_path / "dies.py").write_text(DIES)
    ended = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--max-restarts", 2,
                   "--monitor-interval", 0.1, tmp_path / "dies.py", how, tmp_path / "mark", times, *flags, "--save",
                   tmp_path / "s", "--load", tmp_path / "s", "--metrics-file", tmp_path / "m")
    assert "given twice" not in ended.stderr and "started differently" not in ended.stderr, ended.stderr
    if times > 2:
        assert ended.returncode != 0 and max(step["iteration"] for step in records(tmp_path / "m")) == 4
        return
    assert ended.returncode == 0 and ended.stdout.count("loaded weights and optimizer of global_step4") == times
    assert lines(tmp_path / "m") == lines(tmp_path / "whole.jsonl")
    assert total_digest(tmp_path / "s") == total_digest(tmp_path / "whole")


# ---- a message that could not be written to the ranks' store ---------------------------------------------------------


def cut_off(rank: int, world: int, path: str, call: str) -> list[str]:
    """The errors of this call, whose message does not fit the disk, and of all calls after it."""
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=0, world_size=1)
    board = StoreKV("b")
    board.write("one", 1)
    size = os.path.getsize(path) + 10
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    calls: dict[str, Callable[[], object]] = {
        "write": lambda: board.write("two", 100 * "x"),
        "replace": lambda: board.compare_and_set("two", None, 100 * "x"),
        "count": lambda: board.add(100 * "two"), "read": lambda: board.read("one"),
        "read all": lambda: board.read_all(["one"])}
    said = []
    for name in (call, *calls):
        try:
            calls[name]()
        except RuntimeError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize("call", ["write", "replace", "count"])
def test_a_board_is_not_asked_again_after_a_note_that_was_cut_off(call: str, tmp_path: Path) -> None:
    ((first, *others),) = run_ranks(cut_off, 1, str(tmp_path / "store"), call, init=False)
    assert first == "DistStoreError: File too large"
    assert others == 5 * ["RuntimeError: a message could not be written to the store"]
