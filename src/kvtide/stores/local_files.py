"""The directory of a local pool: whose it is, whether it is usable, and how large it may be."""

from __future__ import annotations

import errno
import json
import logging
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import lmdb

from kvtide.errors import StoreOpenError
from kvtide.stores.memory_buffer import PAGE_BYTES
from kvtide.stores.slab import pages_file_bytes, preallocate
from kvtide.units import format_size

FORMAT_VERSION = 1
MARKER = "kvtide-pool.json"
LOCKS = "locks"
INDEX = "index.lmdb"
SLAB = "slab"
PAGES = "pages"
_OUR_FILES = {MARKER, f"{MARKER}.new", LOCKS, INDEX, f"{INDEX}-lock", SLAB, PAGES}

MIN_POOL_BYTES = 64 * PAGE_BYTES
_MOST_POOL_BYTES = PAGE_BYTES << 32
"""The index has 32 bits for a page's number."""
_LARGEST_DEFAULT_BYTES = 64 << 30
_MIN_INDEX_BYTES = 2 << 20
_INDEX_SHARE = 64
_SMALL_INDEX_SHARE = 8
_SMALL_INDEX_BYTES = 64 << 20
"""The index gets 1/64 of the pool, small pools more, since small models have small values. A value
with a key of 131 characters takes about 450 bytes of it."""
_NETWORK_FILE_SYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "afs"}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Marker:
    """What ``kvtide-pool.json`` says; it is written last, so a directory that has it is complete.

    ``is_clean`` is set when the last process closed the pool and everything is on the disk: only
    then does the pool outlive a restart of the machine.
    """

    format_version: int
    size_bytes: int
    index_bytes: int
    boot_id: str
    is_clean: bool


def boot_id() -> str:
    """Return the identity of this run of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def check_directory(path: Path) -> None:
    """Create the directory if need be, and do nothing more if it can hold a pool.

    Raises:
        StoreOpenError: it is a file, not writable, on a network, or holds what is not ours.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        found = {entry.name for entry in os.scandir(path)}
    except (FileExistsError, NotADirectoryError) as error:
        raise StoreOpenError(
            f"{error.filename} is a file: a local store needs a directory"
        ) from error
    except OSError as error:
        raise StoreOpenError(
            f"{path} cannot be used ({error.strerror}): give this user the right to create and"
            " write it, or choose another path"
        ) from error
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise StoreOpenError(
            f"{path} is not writable for this user: change its mode or choose another path"
        )
    foreign = sorted(found - _OUR_FILES)
    if foreign:
        raise StoreOpenError(
            f"{path} holds other files ({', '.join(foreign[:3])}): a local store needs a directory"
            f" of its own, for instance {path / 'kvtide'}"
        )
    kind = file_system_of(path)
    if kind in _NETWORK_FILE_SYSTEMS:
        raise StoreOpenError(
            f"{path} lies on a network file system ({kind}), where processes do not share memory:"
            " use a local disk or /dev/shm"
        )


def read_marker(path: Path) -> Marker | None:
    """Return the directory's marker, None where there is none.

    Raises:
        StoreOpenError: another version of kvtide wrote it, or it is not readable.
    """
    try:
        content = json.loads((path / MARKER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise StoreOpenError(
            f"{path / MARKER} cannot be read ({error}): remove the directory to start empty"
        ) from error
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise StoreOpenError(
            f"{path} has pool format {version!r}, this kvtide writes {FORMAT_VERSION}: remove the"
            " directory, or use another one"
        )
    try:
        return _checked(Marker(**content))
    except (TypeError, ValueError) as error:
        raise StoreOpenError(
            f"{path / MARKER} is damaged ({error}): remove the directory to start empty"
        ) from error


def write_marker(path: Path, marker: Marker) -> None:
    """Replace the directory's marker in one step."""
    new = path / f"{MARKER}.new"
    new.write_text(json.dumps(asdict(marker), indent=2) + "\n", encoding="utf-8")
    new.replace(path / MARKER)


def is_usable(path: Path, marker: Marker) -> bool:
    """Tell whether the pool's content may be read: complete, and not torn by a loss of power."""
    if marker.boot_id != boot_id() and not marker.is_clean:
        _log.warning("%s was in use when the machine stopped: it starts empty", path)
        return False
    num_pages = marker.size_bytes // PAGE_BYTES
    expected = {
        SLAB: marker.size_bytes,
        PAGES: pages_file_bytes(num_pages),
        INDEX: marker.index_bytes,
    }
    for name, num_bytes in expected.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != num_bytes:
            _log.warning("%s is missing or damaged: the pool starts empty", file)
            return False
    return True


def create_pool(path: Path, size_bytes: int | None) -> Marker:
    """Make the slab and the pages file, replacing what is there; the index comes with its opening.

    ``size_bytes`` None: half of what is free. The marker is returned, not yet written.

    Raises:
        StoreOpenError: there is not enough space.
    """
    for name in (MARKER, INDEX, f"{INDEX}-lock", SLAB, PAGES):
        (path / name).unlink(missing_ok=True)
    size_bytes = _checked_size(path, size_bytes)
    num_pages = size_bytes // PAGE_BYTES
    try:
        preallocate(path / SLAB, size_bytes)
        preallocate(path / PAGES, pages_file_bytes(num_pages))
    except OSError as error:
        raise _no_space(path, size_bytes, free_bytes(path)) from error
    return Marker(FORMAT_VERSION, size_bytes, index_bytes_of(size_bytes), boot_id(), is_clean=False)


def index_bytes_of(size_bytes: int) -> int:
    """Return the size of the index of a pool of ``size_bytes``, in whole pages."""
    small = min(size_bytes // _SMALL_INDEX_SHARE, _SMALL_INDEX_BYTES)
    num_bytes = max(_MIN_INDEX_BYTES, small, size_bytes // _INDEX_SHARE)
    return num_bytes // PAGE_BYTES * PAGE_BYTES


def fill_holes(path: Path, num_bytes: int) -> None:
    """Make every byte of the file ``path`` really there, and leave it whole if that fails.

    Raises:
        OSError: no space.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    finally:
        os.close(fd)


def cannot_open(path: Path, error: Exception) -> StoreOpenError:
    """Return what to raise when the system or LMDB refuses to open the pool, with a remedy."""
    code = error.errno if isinstance(error, OSError) else None
    if code in (errno.ENOSPC, errno.EDQUOT) or isinstance(error, lmdb.DiskError):
        advice = "free some space on its file system"
    elif code in (errno.EACCES, errno.EPERM, errno.EROFS):
        advice = "give this user the right to read and write its files, or choose another path"
    elif code in (errno.EMFILE, errno.ENFILE, errno.ENOMEM) or isinstance(error, lmdb.MemoryError):
        advice = "raise this limit of the process or the machine"
    else:
        advice = "stop the processes that use it and remove the directory to start empty"
    return StoreOpenError(f"{path} cannot be opened ({error}): {advice}")


def in_use(marker: Marker) -> Marker:
    """Return the marker of a pool that is open now."""
    return replace(marker, boot_id=boot_id(), is_clean=False)


def free_bytes(path: Path) -> int:
    """Return what a user may still write to the file system of ``path``, in bytes."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def file_system_of(path: Path) -> str:
    """Return the kind of file system that ``path`` lies on, such as ``tmpfs``; '' where unknown."""
    resolved = str(path.resolve())
    best, kind = "", ""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < len(("device", "mount", "kind")):
            continue
        mount = fields[1].replace("\\040", " ")
        inside = resolved == mount or resolved.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, fields[2]
    return kind


def _checked(marker: Marker) -> Marker:
    sizes = {
        "size_bytes": (marker.size_bytes, MIN_POOL_BYTES),
        "index_bytes": (marker.index_bytes, 1),
    }
    for name, (num_bytes, least) in sizes.items():
        # bool is an int to isinstance.
        if type(num_bytes) is not int or num_bytes % PAGE_BYTES:
            raise ValueError(f"{name} is no number of whole pages")
        if not least <= num_bytes <= _MOST_POOL_BYTES:
            raise ValueError(f"{name} is out of range")
    if type(marker.boot_id) is not str or type(marker.is_clean) is not bool:
        raise ValueError("boot_id or is_clean is of the wrong type")
    return marker


def _checked_size(path: Path, size_bytes: int | None) -> int:
    free = free_bytes(path)
    if size_bytes is None:
        size_bytes = min(free, _free_memory(path)) // 2
        size_bytes = min(size_bytes, _LARGEST_DEFAULT_BYTES) // PAGE_BYTES * PAGE_BYTES
        if size_bytes < MIN_POOL_BYTES:
            raise _no_space(path, MIN_POOL_BYTES, free)
        return size_bytes
    size_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
    needed = size_bytes + pages_file_bytes(size_bytes // PAGE_BYTES) + index_bytes_of(size_bytes)
    if needed > free:
        raise _no_space(path, needed, free)
    return size_bytes


def _free_memory(path: Path) -> int:
    """Return the memory that a pool on tmpfs could take; without bound on a disk."""
    unbounded = 1 << 62
    if file_system_of(path) not in ("tmpfs", "ramfs"):
        return unbounded
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return unbounded


def _no_space(path: Path, needed: int, free: int) -> StoreOpenError:
    advice = "ask for less (?size=) or free some space"
    if str(path.resolve()).startswith("/dev/shm"):  # noqa: S108 - only looked at
        advice += "; in a container /dev/shm is often 64 MiB: start it with a larger --shm-size"
    return StoreOpenError(
        f"a pool in {path} needs {format_size(needed)}, but {format_size(free)} are free: {advice}"
    )
