"""TCP ports of this machine: which are free, and who listens on one."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from kvtide.stores.processes import command_of

_PROC = Path("/proc")
_LISTENING = "0A"
_MOST_SHOWN = 70
"""Characters of a command line: enough to know whose it is, and not a screen of flags."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket that listens: on which address, and who holds it, where this user may know."""

    address: IPv4Address | IPv6Address
    port: int
    pid: int | None

    def serves(self, host: IPv4Address) -> bool:
        """Whether connections to ``host`` come to it: it listens there, or everywhere."""
        return self.address == host or self.address.is_unspecified

    def __str__(self) -> str:
        if self.pid is None:
            return "a process of another user or container"
        program, _, arguments = command_of(self.pid).partition(" ")
        command = f"{Path(program).name} {arguments}".strip()
        if len(command) > _MOST_SHOWN:
            command = f"{command[:_MOST_SHOWN]}..."
        return f"process {self.pid} ({command})" if command else f"process {self.pid}"


def free_ports(num_ports: int, host: str = "127.0.0.1") -> list[int]:
    """Return ports of ``host``, all different, that nobody listens on now."""
    with ExitStack() as stack:
        ports = []
        for _ in range(num_ports):
            sock = stack.enter_context(socket.socket())
            sock.bind((host, 0))
            ports.append(int(sock.getsockname()[1]))
        return ports


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen on ``port`` of ``host``.

    Raises:
        OSError: ``host`` is no address of this machine, or the port is not for this user.
    """
    with socket.socket() as sock:
        # As servers do, who need not wait for the connections of their predecessor to be forgotten.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
            sock.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def listeners(port: int) -> list[Listener]:
    """Return who listens on ``port``, on whatever address of this machine."""
    sockets = {inode: address for address, inode in _listening_sockets(port)}
    if not sockets:
        return []
    holders = dict.fromkeys(sockets)
    for pid, inode in _open_sockets():
        if inode in holders:
            holders[inode] = pid
    return [Listener(sockets[inode], port, pid) for inode, pid in holders.items()]


def listens(pid: int, port: int) -> bool:
    """Whether process ``pid``, which must be this user's, listens on ``port``."""
    inodes = {inode for _, inode in _listening_sockets(port)}
    return bool(inodes) and any(inode in inodes for inode in _sockets_of(pid))


def _listening_sockets(port: int) -> Iterator[tuple[IPv4Address | IPv6Address, str]]:
    """Yield the address and the inode of each socket that listens on ``port``."""
    for table in ("tcp", "tcp6"):
        try:
            lines = (_PROC / "net" / table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue  # a kernel without IPv6
        for line in lines:
            fields = line.split()
            address, _, number = fields[1].partition(":")
            if fields[3] == _LISTENING and int(number, 16) == port:
                yield _address(address), fields[9]


def _address(text: str) -> IPv4Address | IPv6Address:
    """Read an address as the kernel prints it: words of 4 bytes, each as this machine has it."""
    words = (int(text[at : at + 8], 16) for at in range(0, len(text), 8))
    address = ip_address(b"".join(word.to_bytes(4, sys.byteorder) for word in words))
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _open_sockets() -> Iterator[tuple[int, str]]:
    """Yield the pid and the inode of each socket that this user may see."""
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            for inode in _sockets_of(int(entry.name)):
                yield int(entry.name), inode


def _sockets_of(pid: int) -> Iterator[str]:
    try:
        links = list((_PROC / str(pid) / "fd").iterdir())
    except OSError:
        return  # it has ended, or it is another user's
    for link in links:
        try:
            target = os.readlink(link)  # noqa: PTH115 - no path: "socket:[4711]"
        except OSError:
            continue  # it was closed meanwhile
        if target.startswith("socket:["):
            yield target[len("socket:[") : -1]
