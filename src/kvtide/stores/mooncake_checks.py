"""What stands against starting a pool on this machine: one sentence for each, with the remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from ipaddress import AddressValueError, IPv4Address
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from kvtide.stores.machine_memory import available_memory_bytes
from kvtide.stores.mooncake_programs import PoolSettings
from kvtide.stores.mooncake_settings import LEAST_SEGMENT_BYTES
from kvtide.stores.ports import is_free, listeners
from kvtide.units import format_size

_MOST_LEASE_MS = 24 * 3600 * 1000


def master_faults(settings: PoolSettings) -> Iterator[str]:
    """Yield what stands against starting the master."""
    if not 0 <= settings.lease_ms <= _MOST_LEASE_MS:
        yield f"the lease of {settings.lease_ms} ms is not from 0 to {_MOST_LEASE_MS} (a day)"
    host_fault = _host_fault(settings.host)
    if host_fault is not None:
        yield host_fault
    ports = {"--port": settings.port, "--metrics-port": settings.metrics_port}
    if settings.port == settings.metrics_port:
        yield f"--port and --metrics-port are both {settings.port}: give each its own"
        del ports["--metrics-port"]
    for option, port in ports.items():
        if not 0 < port < 1 << 16:
            yield f"{option} {port} is no port: choose one from 1024 to 65535"
        elif host_fault is None:
            fault = _port_fault(option, settings.host, port)
            if fault is not None:
                yield fault


def owner_faults(settings: PoolSettings) -> Iterator[str]:
    """Yield what stands against starting the owner."""
    size = settings.segment_bytes
    if size < LEAST_SEGMENT_BYTES:
        yield (
            f"--size {format_size(size)} is too small: a segment of Mooncake has at least"
            f" {format_size(LEAST_SEGMENT_BYTES)}"
        )
    available = available_memory_bytes()
    if size > available:
        yield (
            f"--size {format_size(size)} is more than the memory that is available here:"
            f" choose at most {format_size(available)}"
        )


def folder_fault(folder: Path) -> str | None:
    """Make ``folder``, with its parents; return why it cannot be made or written to, if so."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return f"the folder {folder} cannot be written ({error.strerror}): choose another --folder"
    return None


def differences(running: PoolSettings, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield what of ``given``, fields of the settings, a pool that runs does not have."""
    for name, wanted in given.items():
        has = getattr(running, name)
        if has == wanted:
            continue
        option = "--" + name.replace("_", "-")
        if name == "segment_bytes":
            option, has, wanted = "--size", format_size(has), format_size(wanted)  # noqa: PLW2901
        yield (
            f"the pool runs with {option} {has}, not {wanted}: `kvtide pool down` first, or choose"
            " another --folder"
        )


def _host_fault(host: str) -> str | None:
    remedy = "write 127.0.0.1, or an address of this machine that others reach it by"
    try:
        address = IPv4Address(host)
    except AddressValueError:
        return f"--host {host!r} is no IPv4 address: {remedy}"
    if address.is_unspecified:
        return f"--host {host} is no address that clients can connect to: {remedy}"
    try:
        is_free(host, 0)
    except OSError:
        return f"--host {host} is no address of this machine: {remedy}"
    return None


def _port_fault(option: str, host: str, port: int) -> str | None:
    try:
        if is_free(host, port):
            return None
    except OSError as error:
        return f"{option} {port} cannot be had ({error.strerror}): choose one from 1024 to 65535"
    holders = [str(found) for found in listeners(port) if found.serves(IPv4Address(host))]
    who = " and ".join(holders) or "a process that cannot be told"
    return f"{option} {port} is in use by {who}: end it, or choose another port"
