"""How many threads an engine should use: physical cores that this process may run on, within its CPU limit.

Free of torch, so that a replica can share its machine out before anything is loaded.
"""

import math
import os
from collections.abc import Iterable
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")


def default_threads() -> int:
    """One a physical core of the affinity mask, of one NUMA node only, and no more than the control group's CPUs."""
    cores: dict[str, set[str]] = {}
    for cpu in _cpus():
        cores.setdefault(_node(cpu), set()).add(_core(cpu))
    largest = max(len(node) for node in cores.values())
    limit = min(_cpu_limits(_CGROUP))
    return max(1, largest if math.isinf(limit) else min(largest, math.ceil(limit)))


def _cpus() -> Iterable[int]:
    """The affinity mask, where the system has one."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def _core(cpu: int) -> str:
    """A name that hardware threads of one core share."""
    try:
        return (_CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _node(cpu: int) -> str:
    return next((link.name for link in (_CPUS / f"cpu{cpu}").glob("node[0-9]*")), "node0")


def _cpu_limits(root: Path) -> Iterable[float]:
    """CPUs that the control group grants, for both of its versions; infinite where there is no limit."""
    yield math.inf if (limit := _quota(root / "cpu.max")) is None else limit
    yield math.inf if (limit := _old_quota(root / "cpu")) is None else limit


def _quota(file: Path) -> float | None:
    try:
        quota, period = file.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # no such version here, or the quota is the word "max"
        return None


def _old_quota(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return quota / int((folder / "cpu.cfs_period_us").read_text()) if quota > 0 else None
    except (OSError, ValueError):
        return None
