"""Settings of the processes of a run. No JAX."""

import re
from dataclasses import dataclass
from typing import Literal

from jgraph.errors import check_types, require, require_positive
from jgraph.settings import OTHER_DEVICES, check_field, may_change


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Processes of a distributed run. Launchers tell the first three, which otherwise must be set together."""

    coordinator: str = may_change("", OTHER_DEVICES)
    """HOST:PORT of process 0. All processes must be able to reach it, and the port must be free."""
    num_processes: int | None = may_change(None, OTHER_DEVICES)
    """Number of processes."""
    process_id: int | None = may_change(None, OTHER_DEVICES)
    """Index of this process, from 0."""
    setup: Literal["auto", "off"] = may_change("auto", OTHER_DEVICES)
    """`auto` connects to the other processes that torchrun, Open MPI, Slurm, Kubernetes or the options above define. `off` runs
    one process."""
    local_devices: str = may_change("auto", OTHER_DEVICES)
    """GPUs of this process: its share of the visible ones if the launcher started several processes on this machine (`auto`),
    `all` visible ones, or indices such as `0,1`."""
    timeout: float = may_change(15.0, OTHER_DEVICES)
    """Seconds without an answer of another machine until it is lost. A process that is killed is noticed at once, and one that
    only waits or computes is never lost."""

    def __post_init__(self):
        check_types(self, prefix="distributed.")
        check_field(self, "distributed.timeout", 1 <= self.timeout <= 3600, "at least 1 and at most 3600")
        is_list = bool(re.fullmatch(r"\d+(,\d+)*", self.local_devices))
        allowed = "auto, all, or different indices of GPUs such as 0,1"
        is_set = is_list and len(set(self.local_devices.split(","))) == self.local_devices.count(",") + 1
        check_field(self, "distributed.local_devices", self.local_devices in ("auto", "all") or is_set, allowed)
        flags = {"coordinator": self.coordinator or None, "num_processes": self.num_processes, "process_id": self.process_id}
        given = [name for name, value in flags.items() if value is not None]
        for name, value in flags.items() if given else ():
            require(value is not None, f"distributed.{name}", value, f"set together with `distributed.{given[0]}`")
        if self.num_processes is None or self.process_id is None:
            return
        check_field(self, "distributed.setup", self.setup != "off", "auto if `distributed.coordinator` is set")
        host, _, port = self.coordinator.rpartition(":")
        is_address = bool(host) and port.isdecimal() and 0 < int(port) < 2**16
        check_field(self, "distributed.coordinator", is_address, "HOST:PORT of process 0")
        require_positive(self, "num_processes", prefix="distributed.")
        allowed = f"at least 0 and less than `distributed.num_processes` {self.num_processes}"
        check_field(self, "distributed.process_id", 0 <= self.process_id < self.num_processes, allowed)
