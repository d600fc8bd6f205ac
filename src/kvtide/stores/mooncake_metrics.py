"""What a Mooncake master says of itself: its metrics over HTTP, and the few that matter here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException

from kvtide.errors import StoreLostError

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*(?:\{.*\})?)\s+(\S+)")
_SEGMENT = re.compile(r'segment_total_capacity_bytes\{segment="(.*)"\}')


@dataclass(frozen=True, slots=True)
class MasterMetrics:
    """The state and the counters of a master; counters are since it started."""

    capacity_bytes: int
    used_bytes: int
    num_keys: int
    num_clients: int
    num_gets: int
    """Keys whose place was asked for, to be read."""
    num_hits: int
    """Of these, the keys that were there."""
    hit_bytes: int
    num_checks: int
    """Keys whose presence was asked for."""
    num_puts: int
    num_refused_puts: int
    """Keys for which there was no room."""
    num_evicted_keys: int
    evicted_bytes: int
    segments: Mapping[str, int]
    """Bytes of each mounted segment by its name. A dead owner's stays for the time to live."""

    @classmethod
    def parse(cls, text: str) -> MasterMetrics:
        """Read the page; a value that it lacks is 0, as counters are before they are used.

        Raises:
            ValueError: it is no page of a master.
        """
        samples = parse_samples(text)
        if "master_total_capacity_bytes" not in samples:
            raise ValueError("it has no master_total_capacity_bytes")

        def total(*names: str) -> int:
            return int(sum(samples.get(name, 0) for name in names))

        found = ((_SEGMENT.fullmatch(name), value) for name, value in samples.items())
        return cls(
            capacity_bytes=total("master_total_capacity_bytes"),
            used_bytes=total("master_allocated_bytes"),
            num_keys=total("master_key_count"),
            num_clients=total("master_active_clients"),
            num_gets=total("total_get_nums_"),
            num_hits=total("mem_cache_hit_nums_", "file_cache_hit_nums_"),
            hit_bytes=total("mem_cache_hit_bytes_total", "file_cache_hit_bytes_total"),
            num_checks=total(
                "master_exist_key_requests_total", "master_batch_exist_key_items_total"
            ),
            num_puts=total("master_put_end_requests_total", "master_batch_put_end_items_total"),
            num_refused_puts=total("master_put_start_alloc_failures_total"),
            num_evicted_keys=total("master_evicted_key_count"),
            evicted_bytes=total("master_evicted_size_bytes"),
            segments={match[1]: int(value) for match, value in found if match and value},
        )


def parse_samples(text: str) -> dict[str, float]:
    """Return each sample of a page in Prometheus' text format, by its name with its labels."""
    samples = {}
    for line in text.splitlines():
        match = _SAMPLE.fullmatch(line.strip())
        if match and not line.startswith("#"):
            samples[match[1]] = float(match[2])
    return samples


def read_metrics(host: str, port: int, timeout_s: float = 2.0) -> MasterMetrics:
    """Ask the master whose metrics are at ``host:port``.

    Raises:
        StoreLostError: nobody answers within ``timeout_s``, or it is no master that does.
    """
    try:
        return MasterMetrics.parse(_get(host, port, "/metrics", timeout_s))
    except (OSError, HTTPException, ValueError) as error:
        raise StoreLostError(
            f"no Mooncake master answers at http://{host}:{port}/metrics: {error}"
        ) from error


def _get(host: str, port: int, path: str, timeout_s: float) -> str:
    # Not urllib, which would go through the proxy that the environment names.
    connection = HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    finally:
        connection.close()
    if response.status != 200:  # noqa: PLR2004 - OK
        raise ValueError(f"status {response.status}")
    return text
