"""How much memory a process of this machine, or of this container, could still get."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Return what is available: the kernel's estimate, or what a container's limit leaves."""
    return max(0, min([_of_machine(root), *_of_groups(root)]))


def _of_machine(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def _of_groups(root: Path) -> Iterator[int]:
    """Yield what each limit above this process leaves; files that can be dropped do not count."""
    for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, names = "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount, names = (
                "sys/fs/cgroup/memory",
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            )
        else:
            continue
        group = PurePosixPath(path)
        # In a container a path may be the host's, of which only the root is there.
        for level in (group, *group.parents):
            left = _left(root / mount / str(level).lstrip("/"), *names)
            if left is not None:
                yield left


def _left(folder: Path, limit: str, usage: str, droppable: str) -> int | None:
    try:
        most = (folder / limit).read_text(encoding="ascii").strip()
        used = int((folder / usage).read_text(encoding="ascii"))
        stat = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    if most == "max":
        return None
    dropped = sum(int(line.split()[1]) for line in stat if line.split()[0] == droppable)
    return int(most) - used + dropped
