"""Ports of this machine, with real sockets: whether one is free, and who has it."""

import os
import socket
import subprocess
import sys
from contextlib import closing
from ipaddress import IPv4Address

import pytest

from kvtide.stores.ports import Listener, free_ports, is_free, listeners, listens
from tests.stores.sockets import listen

pytestmark = pytest.mark.timeout(60)


def test_free_ports_are_different_and_free() -> None:
    """Each could be listened on."""
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(is_free("127.0.0.1", port) for port in ports)
    assert not any(listeners(port) for port in ports)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "0.0.0.0"])  # noqa: S104 - a case
def test_who_listens_is_found(host: str) -> None:
    """By address, pid and command."""
    with closing(listen(host)) as sock:
        port = sock.getsockname()[1]
        assert not is_free(host, port)
        [found] = listeners(port)
        assert found == Listener(IPv4Address(host), port, os.getpid())
        assert listens(os.getpid(), port)
        assert not listens(os.getppid(), port)
        assert found.serves(IPv4Address("127.0.0.1")) == (host != "127.0.0.2")
    assert is_free(host, port)
    assert not listens(os.getpid(), port)


def test_who_listens_by_ipv6_serves_ipv4_too() -> None:
    """As most servers do that listen everywhere."""
    try:
        sock = listen("::", socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with closing(sock):
        [found] = listeners(sock.getsockname()[1])
        assert found.pid == os.getpid()
        assert found.serves(IPv4Address("127.0.0.1"))
        assert not is_free("127.0.0.1", found.port)


def test_an_ipv4_address_written_as_ipv6_is_that_address() -> None:
    """The kernel shows it as such."""
    try:
        sock = listen("::ffff:127.0.0.1", socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with closing(sock):
        [found] = listeners(sock.getsockname()[1])
        assert found.address == IPv4Address("127.0.0.1")


def test_a_port_whose_server_has_just_ended_is_free() -> None:
    """Its connections are remembered for a minute, which keeps no server from starting."""
    with closing(listen("127.0.0.1")) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # the side that closes first is the one that remembers
        client.close()
    assert is_free("127.0.0.1", port)


def test_an_address_of_another_machine_is_refused() -> None:
    """That is not a question of the port."""
    with pytest.raises(OSError, match="Cannot assign requested address"):
        is_free("192.0.2.77", 0)


def test_a_listener_names_its_process_briefly() -> None:
    """The program without its path, and not all of its flags."""
    code = (
        "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen();"
        "print(s.getsockname()[1], flush=True); input()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, "x" * 200],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    [found] = listeners(int(child.stdout.readline()))
    name = os.path.basename(sys.executable)  # noqa: PTH119 - a name in a command line
    assert str(found).startswith(f"process {child.pid} ({name} -c import socket")
    assert str(found).endswith("...)")
    assert len(str(found)) < 120
    child.communicate("\n")


def test_a_listener_that_may_not_be_known_says_so() -> None:
    """Of another user's process only the socket is seen."""
    hidden = Listener(IPv4Address("127.0.0.1"), 80, None)
    assert str(hidden) == "a process of another user or container"
