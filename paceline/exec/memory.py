"""How much memory there is, and how much of it K/V may take. Knows /proc and cgroups, no model."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

CPU_SHARE = 0.25
"""Share of the free host memory that K/V may take: a laptop has other things to do."""


def available_host_bytes() -> int:
    """Bytes this process could still take: the tightest of the machine's and its cgroup's word."""
    bounds = [_meminfo_available(), _cgroup_left()]
    known = [bound for bound in bounds if bound is not None]
    return min(known, default=4 << 30)


def return_freed_host_memory() -> None:
    """Hand memory that the allocator keeps after loading back to the system (glibc only)."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):
        return


def _meminfo_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:  # no /proc: macOS and others tell at least the size of the machine
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (OSError, ValueError):
        return None


def _cgroup_left() -> int | None:
    root = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            return max(int((root / limit).read_text()) - int((root / used).read_text()), 0)
        except (OSError, ValueError):  # no such file, or "max": no limit
            continue
    return None
