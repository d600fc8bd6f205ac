"""The master's page of metrics: what is read of it, and what is no such page."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from kvtide.errors import StoreLostError
from kvtide.stores.mooncake_metrics import MasterMetrics, parse_samples, read_metrics
from kvtide.stores.ports import free_ports

PAGE = """\
# HELP master_total_capacity_bytes Total memory capacity across all mounted segments
# TYPE master_total_capacity_bytes gauge
master_total_capacity_bytes 134217728
master_allocated_bytes 200000
segment_total_capacity_bytes{segment="127.0.0.1:13796"} 67108864
segment_total_capacity_bytes{segment="host}\\"x"} 6.7108864e+07
segment_total_capacity_bytes{segment="unmounted"} 0
master_key_count 2
master_exist_key_requests_total 4
master_batch_exist_key_items_total 30
master_put_start_alloc_failures_total 5
mem_cache_hit_nums_ 2
file_cache_hit_nums_ 1
total_get_nums_ 7
master_value_size_bytes_bucket{le="+Inf"} 4
"""


class Page(BaseHTTPRequestHandler):
    """Answers with the server's ``text``, or with 404."""

    def do_GET(self) -> None:
        body = self.server.text.encode()  # type: ignore[attr-defined]
        self.send_response(200 if body else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - as the base
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    """Return a server of pages."""
    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_the_page_is_read() -> None:
    """Counters of both forms are added; what is absent has not been counted yet."""
    metrics = MasterMetrics.parse(PAGE)
    assert (metrics.capacity_bytes, metrics.used_bytes) == (128 << 20, 200_000)
    assert metrics.segments == {"127.0.0.1:13796": 64 << 20, 'host}\\"x': 64 << 20}
    assert (metrics.num_keys, metrics.num_checks, metrics.num_refused_puts) == (2, 34, 5)
    assert (metrics.num_gets, metrics.num_hits) == (7, 3)
    assert metrics.num_evicted_keys == 0


def test_samples_are_named_with_their_labels() -> None:
    """Comments and what is no sample are passed over."""
    assert parse_samples('# a 1\nb 2\nc{x="1"} +Inf\n\nno sample here\n') == {
        "b": 2,
        'c{x="1"}': float("inf"),
    }


def test_a_page_is_fetched_without_a_proxy(
    server: HTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy that the environment names would not know this machine's loopback."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    server.text = PAGE  # type: ignore[attr-defined]
    assert read_metrics("127.0.0.1", server.server_port) == MasterMetrics.parse(PAGE)


@pytest.mark.parametrize(
    "text,reason", [("", "status 404"), ("other_metric 1\n", "no master_total"), ("x y\n", "x y|y")]
)
def test_a_page_of_somebody_else_is_refused(server: HTTPServer, text: str, reason: str) -> None:
    """The message says who was asked, and why it is no master."""
    server.text = text  # type: ignore[attr-defined]
    with pytest.raises(StoreLostError, match=reason) as caught:
        read_metrics("127.0.0.1", server.server_port)
    assert f"http://127.0.0.1:{server.server_port}/metrics" in str(caught.value)


def test_nobody_at_the_port_is_a_lost_store() -> None:
    """The same error, at once."""
    [port] = free_ports(1)
    with pytest.raises(StoreLostError, match="refused"):
        read_metrics("127.0.0.1", port)
