"""Lent: the share of this machine's cores and memory that a container may use.

Linux tells it in control groups: `cpu.max` and `memory.max` of version 2 (the kernel's
Documentation/admin-guide/cgroup-v2.rst), `cpu.cfs_quota_us` and `memory.limit_in_bytes` of
version 1. A limit holds for all groups below it, so the least one counts. What runs more threads
than it has cores spins away the time of those that work, and what takes more memory is killed.
Imports no MLX: threads are counted before it is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")


def cores() -> int:
    """Cores that this process may keep busy, at least 1; a part of one counts as one."""
    least = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quotas = [*_quotas_v2(), *_quotas_v1()]
    return max(1, min([least or 1, *(-(-quota // period) for quota, period in quotas)]))


def memory_bytes() -> int:
    """Memory of this machine, or what a container may use of it."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [
        *(it for words in _told("", "memory.max") for it in _numbers(words)),
        *(it for words in _told("memory", "memory.limit_in_bytes") for it in _numbers(words)),
    ]
    return min([machine, *(it for it in limits if it > 0)])


def _quotas_v2() -> Iterator[tuple[int, int]]:
    """Microseconds of cores in each period of as many."""
    for words in _told("", "cpu.max"):
        quota, *period = _numbers(words) or [0]
        if quota > 0 and period and period[0] > 0:
            yield quota, period[0]


def _quotas_v1() -> Iterator[tuple[int, int]]:
    periods = _told("cpu", "cpu.cfs_period_us")
    for words, others in zip(_told("cpu", "cpu.cfs_quota_us"), periods, strict=False):
        (quota, *_), (period, *_) = _numbers(words) or [0], _numbers(others) or [0]
        if quota > 0 and period > 0:
            yield quota, period


def _told(controller: str, file: str) -> list[str]:
    """What a file says in this process' group and in those above it; `controller`: of version 1."""
    try:
        told = GROUPS.read_text(errors="surrogateescape")
    except OSError:
        return []
    lines = [line.split(":", 2) for line in told.splitlines()]
    paths = [it[2] for it in lines if len(it) == 3 and controller in it[1].split(",")]
    top = MOUNT / controller  # a link to where it is mounted together with others
    found = []
    for path in paths:
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(top):
                found += _read(folder / file)
    return found


def _read(file: Path) -> list[str]:
    try:
        return [file.read_text()]
    except OSError:
        return []


def _numbers(words: str) -> list[int]:
    """`max` is no number: no limit."""
    return [int(word) for word in words.split() if word.lstrip("-").isdecimal()]
