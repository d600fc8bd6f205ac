"""Available memory, from the files of machines and containers that are not at hand."""

from pathlib import Path

import pytest

from kvtide.stores.machine_memory import available_memory_bytes

GIB = 1 << 30


def machine(root: Path, files: dict[str, object], group: str = "") -> Path:
    """Write the files of a machine on which 8 GiB are available."""
    meminfo = f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {8 << 20} kB\n"
    for name, text in {"proc/meminfo": meminfo, "proc/self/cgroup": group, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    return root


def limit(folder: str, most: object, used: int, droppable: int = 0) -> dict[str, object]:
    """Return the files of a group of version 2."""
    return {
        f"sys/fs/cgroup{folder}/memory.max": f"{most}\n",
        f"sys/fs/cgroup{folder}/memory.current": f"{used}\n",
        f"sys/fs/cgroup{folder}/memory.stat": f"anon 5\ninactive_file {droppable}\nslab 7\n",
    }


def test_this_machine_has_less_than_its_total() -> None:
    """And more than nothing."""
    [total] = [
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal:")
    ]
    assert 0 < available_memory_bytes() < total


def test_without_limits_it_is_what_the_kernel_estimates(tmp_path: Path) -> None:
    """Of a group without a limit, or without files, nothing is known."""
    files = limit("/app", "max", GIB)
    assert available_memory_bytes(machine(tmp_path, files, "0::/app\n")) == 8 * GIB


@pytest.mark.parametrize("group", ["0::/\n", "0::/docker/of-the-host\n"])
def test_a_limit_leaves_what_is_not_used(tmp_path: Path, group: str) -> None:
    """In a container the path may be one that only the host has; the root is the container's."""
    files = limit("", 4 * GIB, GIB)
    assert available_memory_bytes(machine(tmp_path, files, group)) == 3 * GIB


def test_the_tightest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    """A group may have less than its child was given."""
    files = limit("/a/b", 5 * GIB, 0) | limit("/a", 3 * GIB, GIB) | limit("", "max", GIB)
    assert available_memory_bytes(machine(tmp_path, files, "0::/a/b\n")) == 2 * GIB


def test_cached_files_can_be_dropped(tmp_path: Path) -> None:
    """They count as used, but make room."""
    files = limit("", 4 * GIB, 3 * GIB, droppable=2 * GIB)
    assert available_memory_bytes(machine(tmp_path, files, "0::/\n")) == 3 * GIB


def test_a_limit_of_version_1_counts(tmp_path: Path) -> None:
    """It has files of its own, and a huge number where there is no limit."""
    folder = "sys/fs/cgroup/memory"
    files = {
        f"{folder}/memory.limit_in_bytes": 9223372036854771712,
        f"{folder}/memory.usage_in_bytes": 3 * GIB,
        f"{folder}/memory.stat": "total_inactive_file 0\n",
        f"{folder}/pod/memory.limit_in_bytes": 4 * GIB,
        f"{folder}/pod/memory.usage_in_bytes": 3 * GIB,
        f"{folder}/pod/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
    }
    group = "12:cpu,cpuacct:/pod\n5:memory:/pod\n0::/elsewhere\n"
    assert available_memory_bytes(machine(tmp_path, files, group)) == 2 * GIB


def test_a_limit_that_is_passed_leaves_nothing(tmp_path: Path) -> None:
    """Never less."""
    assert available_memory_bytes(machine(tmp_path, limit("", GIB, 2 * GIB), "0::/\n")) == 0
