"""Keys: what a chunk is called in the store, and whose bytes that name stands for.

A pool key is ``<prefix>@<hash in hex>``. The hash names the tokens (and all tokens before them);
the prefix names everything else that decides what the bytes are: the fingerprint of the
:class:`CacheIdentity`, the :class:`~kvtide.core.topology.Part` of the chunk and the KV cache group.
Whatever the identity covers cannot collide, so a wrong name costs a miss and never a wrong byte.

How a prefix is written is a :class:`KeyStyle`. kvtide's own is :class:`PoolKey`;
:class:`VllmPoolKey` writes what vLLM's in-tree store connector writes, without a fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, overload

from kvtide.core.topology import Part

KEY_FORMAT_VERSION = 1
"""Raised whenever the bytes behind an otherwise equal key would change."""


class BlockHashes(Sequence[bytes]):
    """The hashes of a request's hash blocks ``[first, first + num_carried)``, as one blob.

    Indexes are absolute hash-block numbers, so code that enumerates chunks of a whole request
    also runs on a job that carries only its own range; asking for a hash below that range is an
    ``IndexError``. ``len`` is the absolute end, ``first + num_carried``. One blob pickles in a
    few bytes more than its content, whatever the length of the request.
    """

    __slots__ = ("_blob", "_hash_bytes", "first")

    def __init__(self, blob: bytes, hash_bytes: int, *, first: int = 0) -> None:
        if hash_bytes <= 0 or len(blob) % hash_bytes:
            raise ValueError(
                f"{len(blob)} bytes are not a whole number of {hash_bytes}-byte hashes"
            )
        self._blob = blob
        self._hash_bytes = hash_bytes
        self.first = first

    @classmethod
    def pack(cls, hashes: Iterable[bytes], *, first: int = 0) -> BlockHashes:
        """Pack ``hashes``, the first of which has the absolute index ``first``.

        Raises:
            ValueError: the hashes are not all of one length.
        """
        parts = hashes if isinstance(hashes, list) else list(hashes)
        hash_bytes = len(parts[0]) if parts else 1
        blob = b"".join(parts)
        # One look at the sum: an engine has one hash function, and a name cut wrongly only misses.
        if len(blob) != hash_bytes * len(parts):
            raise ValueError("block hashes of one request must have one length")
        return cls(blob, hash_bytes, first=first)

    def __len__(self) -> int:
        return self.first + len(self._blob) // self._hash_bytes

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not self.first <= index < len(self):
            raise IndexError(f"hash {index} is outside the carried [{self.first}, {len(self)})")
        start = (index - self.first) * self._hash_bytes
        return self._blob[start : start + self._hash_bytes]

    def __iter__(self) -> Iterator[bytes]:
        return (self[i] for i in range(self.first, len(self)))

    def hexes(self, indices: Sequence[int]) -> list[str]:
        """Return the hashes at absolute ``indices`` in hex, a whole range of them at once."""
        if not isinstance(indices, range):
            return [self[index].hex() for index in indices]
        if not indices:
            return []
        low, high = indices[0], indices[-1]
        if low < self.first or high >= len(self):
            raise IndexError(f"hashes {indices} are outside [{self.first}, {len(self)})")
        width = self._hash_bytes
        part = self._blob[(low - self.first) * width : (high + 1 - self.first) * width]
        return part.hex("\n", width).split("\n")[:: indices.step]

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickle_hashes, (self._blob, self._hash_bytes, self.first)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockHashes):
            return NotImplemented
        return (self.first, self._blob) == (other.first, other._blob)

    def __hash__(self) -> int:
        return hash((self.first, self._blob))

    def __repr__(self) -> str:
        return f"<BlockHashes [{self.first}, {len(self)})>"


class HashesCutError(IndexError):
    """The engine cut off hashes that were to be read: a session goes on from an earlier token."""


class HashWindow:
    """The hashes ``[first, end)`` of a request, read from the engine's own list when asked for.

    Nothing is copied: a lookup may stop at its first key, and a long list costs the engine's thread
    as much to copy as all the rest of submitting one. The engine may go on growing the list; where
    it cuts it off meanwhile, reading is a :class:`HashesCutError`.
    """

    __slots__ = ("_end", "_hashes", "first")

    def __init__(self, hashes: Sequence[bytes], *, first: int = 0, end: int | None = None) -> None:
        self._hashes = hashes
        self._end = len(hashes) if end is None else end
        self.first = first

    def __len__(self) -> int:
        return self._end

    def hexes(self, indices: Sequence[int]) -> list[str]:
        """Return the hashes at absolute ``indices`` in hex."""
        if not indices:
            return []
        ends = (indices[0], indices[-1]) if isinstance(indices, range) else indices
        if min(ends) < self.first or max(ends) >= self._end:
            raise IndexError(f"hashes {indices} are outside [{self.first}, {self._end})")
        if isinstance(indices, range):
            picked = self._hashes[indices.start : indices.stop : indices.step]
        else:
            picked = [value for index in indices for value in self._hashes[index : index + 1]]
        if len(picked) != len(indices):
            raise HashesCutError(f"the engine has fewer hashes than {self._end} now")
        # One by one: cutting up the hex of all of them takes half as long again.
        return [value.hex() for value in picked]


def _unpickle_hashes(blob: bytes, hash_bytes: int, first: int) -> BlockHashes:
    return BlockHashes(blob, hash_bytes, first=first)


class HexSource(Protocol):
    """Hashes that can be read as hex by absolute index, a whole range at once."""

    def hexes(self, indices: Sequence[int]) -> list[str]:
        """Return the hashes at absolute ``indices`` in hex."""


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """Everything besides the tokens that decides what bytes a key stands for.

    ``engine`` comes from configuration alone (model and weights identity, KV data type, hash
    algorithm and seed, parallel sizes, specs of the groups, payload format); ``worker`` is the
    memory layout that the ranks agreed on; ``deployment`` is replaced when the weights change;
    ``adapter`` is the content digest of the request's adapter, empty for the base model. Values
    must be JSON data.
    """

    engine: Mapping[str, object]
    worker: object
    deployment: str = ""
    adapter: str = ""

    def fingerprint(self) -> str:
        """Return 128 bits in hex over a canonical form of all fields.

        Canonical JSON (sorted keys, no white space) under BLAKE2b, so that equal identities give
        equal keys in every process, whatever the order in which a mapping was filled.

        Raises:
            TypeError: a value is not JSON data.
        """
        text = json.dumps(
            {
                "format": KEY_FORMAT_VERSION,
                "engine": dict(self.engine),
                "worker": self.worker,
                "deployment": self.deployment,
                "adapter": self.adapter,
            },
            sort_keys=True,
            separators=(",", ":"),
            allow_nan=False,
        )
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class KeyMetadata:
    """Whose bytes a key names: the namespace, the part of the chunk and the group.

    ``namespace`` is what the scheduler hands out per prefix id (see :func:`namespace_for`).
    """

    namespace: str
    part: Part
    group_id: int


class KeyStyle(Protocol):
    """How the beginning of a key is written that all chunks have in common, per part and group."""

    def build_prefix(self, metadata: KeyMetadata) -> str:
        """Return that beginning for the part and group that ``metadata`` names."""


class PoolKey:
    """Builds pool keys. The prefix is built once; a key costs one string join and no object."""

    @staticmethod
    def build_prefix(metadata: KeyMetadata) -> str:
        """Return the beginning of a key that all chunks have in common."""
        part = metadata.part
        return (
            f"{metadata.namespace}@pp:{part.pp_rank}@shard:{part.shard_id}@dcp:{part.dcp_rank}"
            f"@group:{metadata.group_id}"
        )

    @staticmethod
    def build_key_string(prefix: str, chunk_hash_hex: str) -> str:
        """Return the key of the chunk whose hash is ``chunk_hash_hex``."""
        return f"{prefix}@{chunk_hash_hex}"


@dataclass(frozen=True, slots=True)
class VllmPoolKey:
    """Writes prefixes as vLLM's in-tree store connector does.

    It counts shards in place of tensor parallel ranks, as that does where ranks in a row hold the
    same bytes. With ``dcp_size`` decode-context parallel ranks each tensor parallel rank is a shard
    to it. Prefill-context parallel ranks it cannot name.
    """

    dcp_size: int = 1

    def build_prefix(self, metadata: KeyMetadata) -> str:
        """Return the beginning of a key that all chunks have in common."""
        part = metadata.part
        return (
            f"{metadata.namespace}@tp_rank:{part.shard_id}@pcp0@dcp{part.shard_id % self.dcp_size}"
            f"@pp_rank:{part.pp_rank}@group:{metadata.group_id}"
        )


def namespace_for(cache_prefix: str, identity: CacheIdentity) -> str:
    """Return the namespace of an identity: the operator's prefix, if any, and the fingerprint."""
    return _prefixed(cache_prefix, f"kvtide:{identity.fingerprint()}")


def vllm_namespace(cache_prefix: str, model: str) -> str:
    """Return the namespace of vLLM's in-tree connector: the model's name as its path ends."""
    return _prefixed(cache_prefix, model.rstrip("/").rsplit("/", 1)[-1])


def _prefixed(cache_prefix: str, name: str) -> str:
    return f"{cache_prefix}@{name}" if cache_prefix else name


@dataclass(slots=True)
class PrefixTable:
    """Namespaces by small ids, so that a job names its prefix in one integer.

    The scheduler hands out ids; ``take_new`` yields those no worker has been told yet, because
    the first metadata that uses an id carries its namespace.
    """

    _ids: dict[str, int] = field(default_factory=dict)
    _names: list[str] = field(default_factory=list)
    _announced: int = 0

    def id_for(self, namespace: str) -> int:
        """Return the id of ``namespace``, making one where it is new."""
        prefix_id = self._ids.get(namespace)
        if prefix_id is None:
            prefix_id = self._ids[namespace] = len(self._names)
            self._names.append(namespace)
        return prefix_id

    def name_of(self, prefix_id: int) -> str:
        """Return the namespace that ``prefix_id`` stands for."""
        return self._names[prefix_id]

    def take_new(self) -> dict[int, str]:
        """Return the namespaces that were not announced before, by id."""
        first, self._announced = self._announced, len(self._names)
        return dict(enumerate(self._names[first:], first))
