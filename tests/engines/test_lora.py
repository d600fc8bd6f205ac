"""Digests of adapters: off the caller's thread, and gone once the folder changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtide.engines.lora import PENDING, AdapterDigests, Pending, adapter_identity
from tests.engines.model_folders import random_tensors, write_safetensors


def make_adapter(path: Path, seed: int = 1) -> Path:
    """Make an adapter's folder."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text('{"r": 8}')
    write_safetensors(path / "adapter_model.safetensors", random_tensors(seed, count=2, size=999))
    return path


def settle(ask: Callable[[], str | Pending | None]) -> str | None:
    """Ask until the answer is no longer pending."""
    deadline = time.monotonic() + 10
    while (answer := ask()) is PENDING:
        assert time.monotonic() < deadline, "a digest never came"
        time.sleep(0.001)
    assert not isinstance(answer, Pending)
    return answer


def wait_for(happened: Callable[[], bool]) -> None:
    """Wait for something that another thread does."""
    deadline = time.monotonic() + 10
    while not happened():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.001)


@pytest.fixture
def digests() -> Iterator[AdapterDigests]:
    """Digests that are looked at again every few calls."""
    made = AdapterDigests(recheck_s=0.05)
    yield made
    made.close()


def test_adapters_are_told_by_content(tmp_path: Path, digests: AdapterDigests) -> None:
    """Two adapters differ, a copy elsewhere is the same, whatever their ids."""
    first, second = make_adapter(tmp_path / "a"), make_adapter(tmp_path / "b", 2)
    copy = make_adapter(tmp_path / "c")
    answers = [
        settle(lambda number=number, path=path: digests.get(number, str(path)))
        for number, path in enumerate((first, second, copy), 1)
    ]
    assert answers[0] == answers[2] == adapter_identity(str(first))
    assert answers[0] != answers[1]
    assert None not in answers


def test_an_adapter_that_cannot_be_read_has_none(tmp_path: Path, digests: AdapterDigests) -> None:
    """A missing or an empty folder and an unknown repository give no digest, and no error."""
    (tmp_path / "empty").mkdir()
    for number, path in enumerate((str(tmp_path / "no"), str(tmp_path / "empty"), "org/no"), 1):
        assert settle(lambda number=number, path=path: digests.get(number, path)) is None


def test_a_folder_that_changes_under_an_id_spoils_the_id(
    tmp_path: Path, digests: AdapterDigests
) -> None:
    """Nobody can tell which version the engine still holds; a fresh id starts anew."""
    path = str(make_adapter(tmp_path / "a"))
    old = settle(lambda: digests.get(1, path))
    make_adapter(tmp_path / "a", 2)
    wait_for(lambda: digests.get(1, path) is None)
    new = settle(lambda: digests.get(2, path))
    assert new not in (None, old)
    make_adapter(tmp_path / "a", 1)
    time.sleep(0.06)
    assert digests.get(1, path) is None


def test_another_folder_under_an_id_spoils_the_id(tmp_path: Path, digests: AdapterDigests) -> None:
    """The engine goes on with the adapter it has read for the id."""
    first, second = str(make_adapter(tmp_path / "a")), str(make_adapter(tmp_path / "b", 2))
    assert settle(lambda: digests.get(1, first)) is not None
    assert digests.get(1, second) is None
    assert digests.get(1, first) is None


def test_while_a_folder_is_looked_at_again_the_known_digest_is_good(tmp_path: Path) -> None:
    """Only the first sight of an adapter costs a wait, however rarely it is asked for."""
    path = str(make_adapter(tmp_path / "a"))
    now = [0.0]
    digests = AdapterDigests(recheck_s=2.0, clock=lambda: now[0])
    known = settle(lambda: digests.get(1, path))
    assert known is not None
    for _ in range(20):
        now[0] += 10.0
        assert digests.get(1, path) == known
    digests.close()


def test_loading_in_place_spoils_the_id(tmp_path: Path, digests: AdapterDigests) -> None:
    """An id whose adapter the engine replaces in place is never used again."""
    path = str(make_adapter(tmp_path / "a"))
    assert settle(lambda: digests.get(1, path)) is not None
    assert digests.get(1, path, replaced_in_place=True) is None
    assert digests.get(1, path) is None


def test_asking_never_waits(tmp_path: Path) -> None:
    """While a digest hangs, every call answers at once and only one digest runs per adapter."""
    release, calls = threading.Event(), []

    def slow(path: str) -> str | None:
        calls.append(path)
        release.wait(10)
        return "digest"

    path = str(make_adapter(tmp_path / "a"))
    digests = AdapterDigests(digest=slow)
    start = time.perf_counter()
    assert all(digests.get(1, path) is PENDING for _ in range(200))
    assert time.perf_counter() - start < 0.5
    release.set()
    assert settle(lambda: digests.get(1, path)) == "digest"
    assert len(calls) == 1
    digests.close()


def test_a_digest_that_raises_is_no_digest(tmp_path: Path) -> None:
    """A request never waits for ever on a folder that breaks the reader."""

    def broken(path: str) -> str | None:
        raise RuntimeError("unreadable")

    digests = AdapterDigests(digest=broken)
    path = str(make_adapter(tmp_path / "a"))
    assert settle(lambda: digests.get(1, path)) is None
    digests.close()


def test_a_full_table_forgets_nothing(tmp_path: Path) -> None:
    """Memory is bounded: adapters beyond the bound go without, those within keep theirs."""
    path = str(make_adapter(tmp_path / "a"))
    digests = AdapterDigests(max_adapters=1)
    kept = settle(lambda: digests.get(1, path))
    assert kept is not None
    assert digests.get(2, path) is None
    assert digests.get(1, path) == kept
    digests.close()


def test_closing_ends_the_thread(tmp_path: Path) -> None:
    """After ``close`` there is no thread and no digest; closing again is harmless."""
    before = threading.active_count()
    digests = AdapterDigests()
    path = str(make_adapter(tmp_path / "a"))
    assert settle(lambda: digests.get(1, path)) is not None
    digests.close()
    digests.close()
    assert threading.active_count() == before
    assert digests.get(1, path) is None
    Path(path).stat()
