"""Tags: the last bytes of every stored value, which prove whose bytes it is and that it is whole.

A store may answer with the bytes of another key, a torn write or a flipped bit; none of these may
reach an engine. The tag binds the payload to its key: what does not verify counts as absent.
"""

from __future__ import annotations

import struct

import numpy as np
import xxhash

from kvtide.stores.memory_buffer import ByteArray

_FORMAT = struct.Struct("<4sHHQQQ")
_MAGIC = b"KVTD"
_VERSION = 1
_RESERVED = 0

TAG_BYTES = _FORMAT.size
"""The length of a tag: magic, version, reserved, key fingerprint, payload length, checksum."""


def tag_for(key: str, payload: ByteArray | memoryview) -> bytes:
    """Return the tag of ``payload`` (contiguous bytes) stored under ``key``.

    The checksum is computed without the interpreter lock, so hashing megabytes delays no thread.
    """
    return _FORMAT.pack(
        _MAGIC,
        _VERSION,
        _RESERVED,
        xxhash.xxh3_64_intdigest(key.encode()),
        len(payload),
        xxhash.xxh3_64_intdigest(_view(payload)),
    )


def write_tag(value: ByteArray | memoryview, key: str, payload_bytes: int) -> None:
    """Write the tag of ``value[:payload_bytes]`` right behind it; nothing is copied.

    Raises:
        ValueError: ``value`` is shorter than ``payload_bytes + TAG_BYTES``.
    """
    end = payload_bytes + TAG_BYTES
    if len(value) < end:
        raise ValueError(f"a value of {len(value)} bytes has no room for {end} bytes")
    _view(value)[payload_bytes:end] = tag_for(key, value[:payload_bytes])


def verify(value: ByteArray | memoryview, key: str, payload_bytes: int) -> bool:
    """Tell whether ``value`` is a payload of ``payload_bytes`` bytes and its tag under ``key``.

    Bytes past the tag are ignored; a value too short to hold both is not whole.
    """
    end = payload_bytes + TAG_BYTES
    if len(value) < end:
        return False
    return bytes(value[payload_bytes:end]) == tag_for(key, value[:payload_bytes])


def _view(value: ByteArray | memoryview) -> memoryview:
    return value.data if isinstance(value, np.ndarray) else value
