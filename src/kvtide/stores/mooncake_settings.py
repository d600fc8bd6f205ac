"""How a Mooncake pool is reached: read off a URL, or off a file as vLLM's connector reads it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvtide.stores.machine_memory import available_memory_bytes
from kvtide.stores.url import StoreUrl, UrlReader
from kvtide.units import format_size

CONFIG_VARIABLE = "MOONCAKE_CONFIG_PATH"
PROTOCOLS = ("tcp", "rdma")
AUTO_DEVICE = "auto"
DEFAULT_BUFFER_BYTES = 16 << 20
DEFAULT_TENANT = "default"
MAX_REPLICAS = 16
LEAST_SEGMENT_BYTES = 16 << 20
"""The smallest segment that Mooncake takes."""
_MAX_PORT = 65535
_RDMA_DEVICES = Path("/sys/class/infiniband")
_FILE_UNITS = {"gb": 1 << 30, "mb": 1 << 20, "kb": 1 << 10, "b": 1, "": 1}
_FILE_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*(gb|mb|kb|b|)")
_MOST_BYTES = 1 << 60
_METADATA = re.compile(r"P2PHANDSHAKE|https?://\S+")


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """Where the master is, how values travel, and what this process contributes.

    ``segment_bytes`` is the memory this process gives to the pool (0: others own it); it is lost
    with the process. ``buffer_bytes`` is memory of Mooncake's own, which kvtide's transfers do not
    pass through. Without ``hostname`` the address from which the master is reached is this
    process's own.
    """

    master_host: str
    master_port: int
    metadata: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    device: str = ""
    segment_bytes: int = 0
    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    tenant: str = DEFAULT_TENANT
    preferred_segment: str = ""
    num_replicas: int = 1
    hostname: str = ""
    source: str = field(default="the store URL", compare=False)
    """Where the address was read, for messages."""
    setup_timeout_s: float = 10.0
    call_timeout_s: float = 5.0

    @property
    def master(self) -> str:
        """The master's address as Mooncake writes it."""
        host = f"[{self.master_host}]" if ":" in self.master_host else self.master_host
        return f"{host}:{self.master_port}"


def read_settings(url: StoreUrl) -> MooncakeSettings:
    """Return what ``url`` says: ``mooncake://HOST:PORT?...`` or, by a file, ``mooncake://[/PATH]``.

    Without a path the file is the one that ``MOONCAKE_CONFIG_PATH`` names; parameters of the URL
    win over the file.

    Raises:
        ConfigError: every fault.
    """
    reader = UrlReader(url, known=_PARAMETERS)
    values = _address(url, reader) if url.host else _file_values(url, reader)
    values |= _parameters(url, reader)
    protocol = values.get("protocol", "tcp")
    if protocol not in PROTOCOLS:
        reader.fault(f"the parameter 'protocol': {protocol!r} is not one of {', '.join(PROTOCOLS)}")
    if protocol == "rdma":
        _check_device(str(values.get("device", "")), reader)
    _check_memory(values, reader)
    _check_texts(values, reader)
    reader.finish()
    if values.get("device") == AUTO_DEVICE or protocol != "rdma":
        values["device"] = ""
    return MooncakeSettings(**values)  # type: ignore[arg-type]


_PARAMETERS = (
    "protocol",
    "metadata",
    "device",
    "segment",
    "buffer",
    "tenant",
    "preferred_segment",
    "replicas",
    "hostname",
    "setup_timeout_ms",
    "call_timeout_ms",
)

_Values = dict[str, str | int | float]


def _parameters(url: StoreUrl, reader: UrlReader) -> _Values:
    values: _Values = {
        name: url.parameters[name]
        for name in ("protocol", "metadata", "device", "tenant", "preferred_segment", "hostname")
        if url.parameters.get(name)
    }
    sizes = {
        "segment_bytes": reader.size("segment", may_be_zero=True),
        "buffer_bytes": reader.size("buffer"),
    }
    values |= {name: size for name, size in sizes.items() if size is not None}
    for name in ("setup_timeout", "call_timeout"):
        timeout_ms = reader.milliseconds(f"{name}_ms")
        if timeout_ms is not None:
            values[f"{name}_s"] = timeout_ms / 1000
    replicas = url.parameters.get("replicas")
    if replicas:
        if replicas.isdecimal() and len(replicas) < 3 and 1 <= int(replicas) <= MAX_REPLICAS:  # noqa: PLR2004
            values["num_replicas"] = int(replicas)
        else:
            reader.fault(
                f"the parameter 'replicas': {replicas!r} is not a number from 1 to {MAX_REPLICAS}"
            )
    return values


def _address(url: StoreUrl, reader: UrlReader) -> _Values:
    if url.path not in ("", "/"):
        reader.fault(f"a Mooncake pool has no path: write mooncake://{url.host}")
    return _master_address(url.host, reader)


def _master_address(text: str, reader: UrlReader) -> _Values:
    host, _, port = text.rpartition(":")
    if "@" in host:
        reader.fault("a Mooncake master takes no user or password: write mooncake://HOST:PORT")
        return {"master_host": "", "master_port": 0}
    is_port = port.isdecimal() and len(port) <= len(str(_MAX_PORT)) and 0 < int(port) <= _MAX_PORT
    if not host or not is_port:
        reader.fault(
            f"{text!r} is not the address of a Mooncake master: write HOST:PORT, for instance"
            " mooncake://10.0.0.1:50051"
        )
        return {"master_host": "", "master_port": 0}
    return {"master_host": host.strip("[]"), "master_port": int(port)}


def _file_values(url: StoreUrl, reader: UrlReader) -> _Values:
    nowhere: _Values = {"master_host": "", "master_port": 0}
    path = url.path if url.path not in ("", "/") else os.environ.get(CONFIG_VARIABLE, "")
    if not path:
        reader.fault(
            "mooncake:// names no master: write mooncake://HOST:PORT, or set"
            f" {CONFIG_VARIABLE} to the JSON file that vLLM's MooncakeStoreConnector reads"
        )
        return nowhere
    if not Path(path).is_file():
        reader.fault(f"the Mooncake configuration {path} cannot be read: it is no file")
        return nowhere
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reader.fault(f"the Mooncake configuration {path} cannot be read: {error}")
        return nowhere
    if not isinstance(data, dict):
        reader.fault(f"the Mooncake configuration {path} is not a JSON object")
        return nowhere
    return _values_of(data, path, reader)


def _values_of(data: Mapping[str, object], path: str, reader: UrlReader) -> _Values:
    """Return what vLLM's connector would understand of a configuration file."""
    values = _master_address(str(data.get("master_server_address", "")), reader)
    values["source"] = f"master_server_address in {path}"
    values["metadata"] = str(data.get("metadata_server") or "P2PHANDSHAKE")
    values["protocol"] = str(data.get("protocol") or "rdma")
    # vLLM leaves the choice of a device to Mooncake where the file names none.
    values["device"] = str(data.get("device_name") or AUTO_DEVICE)
    values["tenant"] = str(data.get("tenant_id") or "").strip() or DEFAULT_TENANT
    mode = data.get("mode", "embedded")
    if mode not in ("embedded", "standalone-store"):
        reader.fault(f"{path}: mode must be 'embedded' or 'standalone-store', but is {mode!r}")
    size = data.get("global_segment_size", 4 << 30 if mode == "embedded" else 0)
    values["segment_bytes"] = _file_size(size, "global_segment_size", path, reader)
    if mode == "standalone-store" and values["segment_bytes"]:
        reader.fault(f"{path}: mode 'standalone-store' needs global_segment_size 0")
    return values


def _file_size(value: object, name: str, path: str, reader: UrlReader) -> int:
    """Return a size as vLLM reads it: GB, MB and KB are powers of 1024 there."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_BYTES:
        return value
    match = _FILE_SIZE.fullmatch(str(value).strip().lower()) if isinstance(value, str) else None
    if match is None:
        reader.fault(f"{path}: {name} must be a size such as '4GB', but is {value!r}")
        return 0
    return int(float(match.group(1)) * _FILE_UNITS[match.group(2)])


def _check_device(device: str, reader: UrlReader) -> None:
    known = sorted(path.name for path in _RDMA_DEVICES.glob("*"))
    if not device:
        reader.fault(
            "protocol=rdma needs the RDMA device: write device=mlx5_0, or device=auto to let"
            f" Mooncake choose (devices of this machine: {', '.join(known) or 'none'})"
        )
    elif not known:
        reader.fault("protocol=rdma: this machine has no RDMA device; write protocol=tcp")
    else:
        absent = [name for name in device.split(",") if name not in (AUTO_DEVICE, *known)]
        if absent:
            reader.fault(
                f"the parameter 'device': this machine has no {', '.join(absent)}, but"
                f" {', '.join(known)}"
            )


def _check_memory(values: _Values, reader: UrlReader) -> None:
    segment_bytes = int(values.get("segment_bytes", 0))
    wanted = (
        ("a segment", segment_bytes, "segment in the URL, global_segment_size in a file"),
        ("a buffer", int(values.get("buffer_bytes", 0)), "buffer in the URL"),
    )
    free_bytes = available_memory_bytes() if any(size for _, size, _ in wanted) else 0
    for what, size, where in wanted:
        if size > free_bytes:
            reader.fault(
                f"{what} of {format_size(size)} is more than the {format_size(free_bytes)} of"
                f" memory that are free here: make it smaller ({where})"
            )
    if 0 < segment_bytes < LEAST_SEGMENT_BYTES:
        reader.fault(
            f"a segment of {format_size(segment_bytes)} is less than Mooncake takes: give"
            f" {format_size(LEAST_SEGMENT_BYTES)} or more, or none"
        )


def _check_texts(values: _Values, reader: UrlReader) -> None:
    for name, value in values.items():
        if not isinstance(value, str) or name == "source":
            continue
        if not (value.isascii() and value.isprintable()):
            reader.fault(f"{name} has characters that Mooncake does not take: {value!r}")
    metadata = str(values.get("metadata", "P2PHANDSHAKE"))
    if not _METADATA.fullmatch(metadata):
        reader.fault(
            f"the metadata service {metadata!r} is not one that kvtide uses: P2PHANDSHAKE, or"
            " http://HOST:PORT/metadata"
        )
