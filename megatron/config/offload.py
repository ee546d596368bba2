"""The section `offload`: where the ranks' shards are kept when not in use: on the device, the host or NVMe."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from megatron.config.problems import ErrorList
from megatron.config.setting import flag_name, flags_have, setting

_OFFLOAD_OPTIMIZER, _OFFLOAD_PARAM = "zero_optimization.offload_optimizer.", "zero_optimization.offload_param."


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Where the ranks' shards are kept when not in use: on the device, the host or NVMe."""

    offload_optimizer_device: Literal["none", "cpu", "nvme"] = setting(
        "none", "where master weights and moments are kept", json=_OFFLOAD_OPTIMIZER + "device")
    offload_optimizer_nvme_path: str | None = setting(
        None, "folder on the NVMe drive", json=_OFFLOAD_OPTIMIZER + "nvme_path", is_location=True)
    offload_optimizer_buffer_count: int = setting(4, "host buffers in front of the NVMe drive",
                                                  json=_OFFLOAD_OPTIMIZER + "buffer_count")
    offload_optimizer_pin_memory: bool = setting(
        True, "page-locked host memory, which a GPU copies from and to faster; on a CPU nothing is locked",
        json=_OFFLOAD_OPTIMIZER + "pin_memory")
    offload_optimizer_pipeline_read: bool = setting(True, "read the next tile while this one is updated",
                                                    json=_OFFLOAD_OPTIMIZER + "pipeline_read")
    offload_optimizer_pipeline_write: bool = setting(True, "write the last tile while this one is updated",
                                                     json=_OFFLOAD_OPTIMIZER + "pipeline_write")
    offload_optimizer_ratio: float = setting(
        1.0, "share of the optimizer's state that leaves the device; the device keeps and updates the rest",
        "optimizer-offload-fraction", json=_OFFLOAD_OPTIMIZER + "ratio")
    offload_update: Literal["auto", "host", "device"] = setting(
        "auto", "where a GPU's offloaded optimizer state is updated: by the host, or on the device, a part at a time; "
        "auto measures both", json=_OFFLOAD_OPTIMIZER + "update")
    delayed_param_update: bool = setting(
        False, "the host updates beside the next forward and backward of the GPU, which use the weights of before: "
        "faster, and inexact", json=_OFFLOAD_OPTIMIZER + "delayed_param_update")
    offload_param_device: Literal["none", "cpu", "nvme"] = setting(
        "none", "where parameters are kept; stage 3 only", "remote-device", json=_OFFLOAD_PARAM + "device")
    offload_param_nvme_path: str | None = setting(
        None, "folder on the NVMe drive", json=_OFFLOAD_PARAM + "nvme_path", is_location=True)
    offload_param_buffer_count: int = setting(5, "host buffers in front of the NVMe drive",
                                              json=_OFFLOAD_PARAM + "buffer_count")
    offload_param_buffer_size: int = setting(100_000_000, "elements per buffer", json=_OFFLOAD_PARAM + "buffer_size")
    offload_param_max_in_cpu: int = setting(1_000_000_000, "elements kept on the host beside the NVMe drive",
                                            json=_OFFLOAD_PARAM + "max_in_cpu")
    offload_param_pin_memory: bool = setting(
        True, "page-locked host memory, which a GPU copies from and to faster; on a CPU nothing is locked",
        "use-pin-memory", json=_OFFLOAD_PARAM + "pin_memory")
    aio_block_size: int = setting(1_048_576, "bytes per NVMe request", json="aio.block_size")
    aio_queue_depth: int = setting(8, "NVMe requests in flight", json="aio.queue_depth")
    aio_intra_op_parallelism: int = setting(1, "reads under way at a time, and as many writes", "aio-thread-count",
                                            json="aio.intra_op_parallelism")
    aio_single_submit: bool = setting(False, "submit NVMe requests one by one", json="aio.single_submit")
    aio_overlap_events: bool = setting(True, "submit further NVMe requests while others complete",
                                       json="aio.overlap_events")

    @property
    def uses_nvme(self) -> bool:
        return "nvme" in (self.offload_optimizer_device, self.offload_param_device)

    def __post_init__(self) -> None:
        problems = ErrorList()
        problems.require_range(self, "offload_optimizer_buffer_count offload_param_buffer_count", 1)
        problems.require_range(self, "offload_param_buffer_size", 1)
        problems.require_range(self, "offload_param_max_in_cpu", 0)
        problems.require_range(self, "aio_block_size aio_queue_depth aio_intra_op_parallelism", 1)
        for kind in ("optimizer", "param"):
            device, path = (getattr(self, f"offload_{kind}_{what}") for what in ("device", "nvme_path"))
            name = flag_name(f"offload_{kind}_device")
            problems.require(device in ("none", "cpu", "nvme"), f"{name} is {device}: expected none, cpu or nvme")
            problems.require(device != "nvme" or bool(path),
                             f"{name} nvme needs {flag_name(f'offload_{kind}_nvme_path')}")
        problems.require(self.offload_update in ("auto", "host", "device"),
                         f"--offload-update is {self.offload_update}: expected auto, host or device")
        problems.require(0 <= self.offload_optimizer_ratio <= 1,
                         f"--offload-optimizer-ratio is {self.offload_optimizer_ratio}: expected a share from 0 to 1")
        problems.require(not self.delayed_param_update or self.offload_optimizer_ratio == 1,
                         f"--delayed-param-update with --offload-optimizer-ratio {self.offload_optimizer_ratio}: the "
                         "device would update its share at once, and the host the rest a step later; leave one of "
                         "them out")
        problems.require(self.offload_update != "device" or self.offload_optimizer_device != "nvme",
                         "--offload-update device with --offload-optimizer-device nvme: state on a drive comes by way "
                         "of the host, and is updated there; leave the flag out, or keep the state on cpu")
        problems.raise_if_any()


_NVME_SETTINGS = {"optimizer": "nvme_path buffer_count pipeline_read pipeline_write".split(),
                  "param": "nvme_path buffer_count buffer_size max_in_cpu".split()}
"""What is read of a section where its state is on a drive."""
_HOST_SETTINGS = {"offload_update", "delayed_param_update"}
"""What is for the optimizer's state on the host."""
_OFFLOAD_SETTINGS = {"optimizer": {"offload_optimizer_pin_memory", "offload_optimizer_ratio", *_HOST_SETTINGS},
                     "param": {"offload_param_pin_memory"}}
"""What is read where the state is off the device."""


def unused_offload_settings(offload: OffloadConfig, of_file: Collection[str] = ()) -> Iterator[str]:
    """A sentence for each section with settings that nothing reads. A default is none; nor is a switch that is off, if
    its flag is among those that a file said (`of_file`): it is off in DeepSpeed, whose guide writes defaults out."""
    changed = [item.name for item in fields(offload) if (value := getattr(offload, item.name)) != item.default
               and not (value is False and item.name.startswith("offload_") and flag_name(item.name) in of_file)]
    yield from _unused_in_section(offload, changed, "optimizer", "the optimizer's state is")
    yield from _unused_in_section(offload, changed, "param", "the parameters are")
    aio = [name for name in changed if name.startswith("aio_")]
    places = {
        flag_name(f"offload_{kind}_device"): getattr(offload, f"offload_{kind}_device")
        for kind in _NVME_SETTINGS
    }
    if aio and "nvme" not in places.values():
        either = " or ".join(f"{name} nvme" for name in places)
        yield f"{flags_have(aio)} no effect here: nothing is on a drive without {either}"


def _unused_in_section(offload: OffloadConfig, changed: Sequence[str], kind: str, state: str) -> Iterator[str]:
    location, device = getattr(offload, f"offload_{kind}_device"), flag_name(f"offload_{kind}_device")
    nvme_settings = {f"offload_{kind}_{what}" for what in _NVME_SETTINGS[kind]}
    unread = {"none": nvme_settings | _OFFLOAD_SETTINGS[kind], "cpu": nvme_settings}.get(location, set())
    names = [name for name in changed if name in unread]
    wanted = "nvme" if nvme_settings & {*names} else "cpu" if _HOST_SETTINGS & {*names} else "cpu or nvme"
    if names and location == "none":
        yield f"{flags_have(names)} no effect here: {state} not offloaded without {device} {wanted}"
    elif names:
        yield f"{flags_have(names)} no effect here: {device} is {location}, not {wanted}"
