"""Sockets that are in the way of somebody."""

import socket


def listen(host: str, family: socket.AddressFamily = socket.AF_INET) -> socket.socket:
    """Listen on some port."""
    sock = socket.socket(family)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
    sock.bind((host, 0))
    sock.listen()
    return sock
