"""A proxy before a Mooncake master that answers as another version: PORT MASTER_PORT.

A process of its own, because the client's set-up holds the interpreter lock of the test's.
"""

from __future__ import annotations

import socket
import sys
import threading

_THIS, _OTHER = b"2.0.0", b"1.9.9"


def pump(source: socket.socket, target: socket.socket, *, is_answer: bool) -> None:
    """Pass bytes on until one side ends; in answers the version is another."""
    while data := source.recv(65536):
        target.sendall(data.replace(_THIS, _OTHER) if is_answer else data)
    target.shutdown(socket.SHUT_WR)


def main(port: int, master_port: int) -> None:
    """Serve until killed."""
    listener = socket.create_server(("127.0.0.1", port))
    while True:
        client, _ = listener.accept()
        master = socket.create_connection(("127.0.0.1", master_port))
        for source, target, is_answer in ((client, master, False), (master, client, True)):
            threading.Thread(
                target=pump, args=(source, target), kwargs={"is_answer": is_answer}, daemon=True
            ).start()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
