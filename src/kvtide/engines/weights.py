"""Whose weights these are, told by content and never by a name or a place.

Two folders called ``llama`` may hold different models, and one model may lie in two places. A
key therefore carries the commit of a hub repository where there is one, and otherwise a digest
of the files themselves.

The digest reads a bounded part of the weights. For safetensors it covers each shard's size, its
whole header (every tensor's name, type and place), both ends, and 4 KiB in the middle of each
tensor: training or merging changes whole tensors, so a changed tensor shows wherever it lies. At
most ``MAX_READS`` such places are read, spread evenly when a model has more tensors (large
mixtures of experts); for a 70 billion parameter model of 140 GB that is about 800 reads, some
0.1 s from a local disk and up to a few seconds from a cold network file system, once at start.
What it cannot see is an edit that leaves all sizes, names and sampled bytes as they were: whoever
patches single values in place gives each version a name of its own with ``weights_version``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from kvtide.errors import ConfigError

MAX_READS = 4096
"""The most sampled places in one folder; the cost of a digest is bounded by it."""

SAMPLE_BYTES = 4096
END_BYTES = 64 * 1024
PLAIN_SAMPLES = 64
"""Places read in a shard whose format says nothing about its tensors."""

_MIN_READS = 16  # per shard, however many shards there are
_MAX_HEADER_BYTES = 256 * 1024 * 1024
_MAX_CONFIG_BYTES = 64 * 1024 * 1024
_WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_CONFIG_NAMES = frozenset(
    {
        "config.json",
        "params.json",
        "quantize_config.json",
        "quant_config.json",
        "hf_quant_config.json",
        "adapter_config.json",
    }
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?(:[\w.-]+)?")
_REMEDY = (
    "set weights_version in kv_connector_extra_config to a string that names these weights "
    "and changes whenever they do"
)


def weights_identity(
    model: str,
    revision: str | None = None,
    *,
    hub_cache: str | os.PathLike[str] | None = None,
    weights_version: str | None = None,
) -> str:
    """Return a string that is equal exactly where the weights behind ``model`` are.

    ``model`` is a local folder or file, or the id of a hub repository; ``revision`` the branch,
    tag or commit asked for. The answer is ``version:...`` where the operator gave a
    ``weights_version``, ``commit:...`` for an untouched snapshot of a hub repository (its commit
    is looked up in the local cache ``hub_cache``, never on the network), else ``digest:...``
    over the files. It depends on no path and no time stamp.

    Raises:
        ConfigError: the weights cannot be read here (a remote address, a missing or an empty
            folder, a repository that was never downloaded); the message names the remedy.
    """
    if weights_version:
        return f"version:{weights_version}"
    path = Path(model).expanduser()
    if path.exists():
        return _local_identity(path)
    if "://" in model or not _HUB_ID.fullmatch(model):
        raise ConfigError(f"the weights of model {model!r} are not on this machine: {_REMEDY}")
    return _hub_identity(model, revision, Path(hub_cache) if hub_cache else default_hub_cache())


def default_hub_cache() -> Path:
    """Return the folder in which the hub's own client keeps snapshots, from its environment."""
    explicit = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if explicit:
        return Path(os.path.expandvars(explicit)).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME") or f"{caches}/huggingface"
    return Path(os.path.expandvars(home)).expanduser() / "hub"


def _hub_identity(model: str, revision: str | None, cache: Path) -> str:
    repository, _, selector = model.partition(":")
    folder = cache / ("models--" + repository.replace("/", "--"))
    commit = revision or "main"
    if not _COMMIT.fullmatch(commit):
        try:
            commit = (folder / "refs" / commit).read_text().strip()
        except OSError:
            raise ConfigError(
                f"revision {commit!r} of model {model!r} is not in the hub cache {cache}: "
                f"download it there, pass its 40-digit commit as --revision, or {_REMEDY}"
            ) from None
    snapshot = folder / "snapshots" / commit
    identity = _local_identity(snapshot) if snapshot.is_dir() else f"commit:{commit}"
    # One repository of quantised files holds many models: which one was asked for counts.
    return f"{identity}:{selector}" if selector else identity


def _local_identity(path: Path) -> str:
    files = _files_that_count(path)
    if not any(file.suffix in _WEIGHT_SUFFIXES for file in files):
        raise ConfigError(f"there are no weights in {path}: {_REMEDY}")
    commit = _snapshot_commit(path, files)
    return f"commit:{commit}" if commit else f"digest:{_digest(files)}"


def _files_that_count(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(
        (
            file
            for file in path.iterdir()
            if (file.suffix in _WEIGHT_SUFFIXES or _is_config(file.name)) and file.is_file()
        ),
        key=lambda file: file.name,
    )


def _is_config(name: str) -> bool:
    # Python files are a model's own code, which computes the KV cache as much as weights do.
    return name in _CONFIG_NAMES or name.endswith((".index.json", ".py"))


def _snapshot_commit(path: Path, files: list[Path]) -> str | None:
    """Return the commit of a hub snapshot, with the part of it that ``path`` names.

    The commit is believed only where each file is still the cache's own link to a blob: a file
    that someone put in its place is not what was committed.
    """
    absolute = Path.cwd() / path
    for folder in (absolute, *absolute.parents):
        if folder.parent.name != "snapshots" or not _COMMIT.fullmatch(folder.name):
            continue
        blobs = (folder.parent.parent / "blobs").resolve()
        if all(file.resolve().parent == blobs for file in files):
            inside = absolute.relative_to(folder).as_posix()
            return folder.name if inside == "." else f"{folder.name}:{inside}"
    return None


def _digest(files: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    shards = [file for file in files if file.suffix in _WEIGHT_SUFFIXES]
    budget = max(MAX_READS // max(len(shards), 1), _MIN_READS)
    for file in files:
        # One file alone is a model of its own, whatever it is called.
        name = file.name if len(files) > 1 else f"*{file.suffix}"
        size = file.stat().st_size
        digest.update(f"{name}\0{size}\0".encode())
        with file.open("rb", buffering=0) as stream:
            if file.suffix in _WEIGHT_SUFFIXES:
                for part in _shard_parts(stream, size, file.suffix, budget):
                    digest.update(part)
            else:
                digest.update(stream.read(_MAX_CONFIG_BYTES))
    return digest.hexdigest()


def _shard_parts(stream: BinaryIO, size: int, suffix: str, budget: int) -> Iterator[bytes]:
    if size <= 2 * END_BYTES + PLAIN_SAMPLES * SAMPLE_BYTES:
        yield stream.read(size)
        return
    places: list[int] | None = None
    if suffix == ".safetensors":
        header = _header(stream, size)
        yield header
        places = _tensor_middles(header)
    if places is None:
        places = [size * number // PLAIN_SAMPLES for number in range(PLAIN_SAMPLES)]
    stride = -(-len(places) // budget) or 1
    for place in (0, *places[::stride], size - END_BYTES):
        stream.seek(min(place, size - SAMPLE_BYTES))
        yield stream.read(END_BYTES if place in (0, size - END_BYTES) else SAMPLE_BYTES)


def _header(stream: BinaryIO, size: int) -> bytes:
    """Return a safetensors header: 8 bytes of length, little-endian, and that much JSON."""
    length = int.from_bytes(stream.read(8), "little")
    return stream.read(min(length, size - 8, _MAX_HEADER_BYTES))


def _tensor_middles(header: bytes) -> list[int] | None:
    """Return where the middle of each tensor lies in the file, or ``None`` for no such header."""
    try:
        tensors = json.loads(header)
        spans = [t["data_offsets"] for name, t in tensors.items() if name != "__metadata__"]
        start = 8 + len(header)
        return sorted(start + max((low + high - SAMPLE_BYTES) // 2, low) for low, high in spans)
    except (ValueError, AttributeError, KeyError, TypeError):
        return None
