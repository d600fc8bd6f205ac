"""A real engine on a Mooncake pool whose master or owner dies or hangs: it answers as without one.

One engine and one pool go through all of it. Each test saves a prompt, breaks the pool, asks for
that prompt and for a new one, mends the pool, and sees that saving and loading resume by
themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvtide.runtime.tags import TAG_BYTES
from kvtide.stores import Status, open_store
from kvtide.stores.mooncake_client import MooncakeClient
from kvtide.testing import Arena, value_of
from kvtide.testing.mooncake import MooncakePool
from tests.engines.vllm.engines import BLOCK, InProcessEngine, engine, prompt_of

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

PROMPT_TOKENS = 400
WHOLE = PROMPT_TOKENS // BLOCK * BLOCK
NUM_PROMPTS = 16
AT_ONCE_S = 2.0
"""A prompt that is computed takes 0.2 s; what is more is for a busy machine."""
LOAD_TIMEOUT_S = 3.0
SAVE_TIMEOUT_S = 3.0
OPTIONS = {
    "load_timeout_s": LOAD_TIMEOUT_S,
    "save_timeout_s": SAVE_TIMEOUT_S,
    "backoff_s": 0.1,
    "max_backoff_s": 0.2,
    "max_load_backoff_s": 0.2,
}


@dataclass(frozen=True, slots=True)
class Broken:
    """An engine, its pool, and prompts with what an engine without kvtide answers to them."""

    one: InProcessEngine
    pool: MooncakePool
    prompts: Iterator[tuple[list[int], list[int]]]

    def ask(self, prompt: list[int], want: list[int]) -> int:
        """Answer a prompt, which must be as without kvtide; return how much of it was loaded."""
        [output] = self.one.run(prompt)
        assert list(output.outputs[0].token_ids) == want
        return int(output.num_cached_tokens)

    def saved(self) -> tuple[list[int], list[int]]:
        """Return a prompt that only the pool holds, with the answer to it."""
        prompt, want = next(self.prompts)
        before = self.one.counters["saved_bytes"]
        assert self.ask(prompt, want) == 0
        self.one.settle()
        assert self.one.counters["saved_bytes"] > before
        self.one.forget_local()
        return prompt, want

    def assert_resumes(self, prompt: list[int], want: list[int], *, limit_s: float = 20.0) -> None:
        """See a prompt that could not be saved be saved and loaded again, with no help."""
        give_up_s = time.monotonic() + limit_s
        while self.ask(prompt, want) != WHOLE:
            assert time.monotonic() < give_up_s, f"never resumed: {self.one.counters}"
            self.one.settle()
            self.one.forget_local()
        self.one.settle()
        self.one.forget_local()
        self.one.pool.check_integrity()
        self.one.worker.check_idle()

    def counted(self, name: str) -> Callable[[], int]:
        """Return what tells by how much a counter has grown from now on."""
        before = self.one.counters[name]
        return lambda: self.one.counters[name] - before


@pytest.fixture(scope="module")
def answers(model: Path) -> list[tuple[list[int], list[int]]]:
    """Prompts, and what an engine without kvtide answers to them."""
    prompts = [prompt_of(PROMPT_TOKENS, seed=2000 + number) for number in range(NUM_PROMPTS)]
    with engine(model, None) as plain:
        return [(prompt, plain.generate(prompt)[0]) for prompt in prompts]


@pytest.fixture(scope="module")
def broken(model: Path, answers: list[tuple[list[int], list[int]]]) -> Iterator[Broken]:
    """An engine on a pool that is soon to be broken."""
    flags = {"client_ttl": 2}
    with (
        MooncakePool(lease_ms=300, master_flags=flags) as pool,
        engine(model, pool.url, options=OPTIONS) as one,
    ):
        yield Broken(one, pool, iter(answers))


@contextmanager
def within(limit_s: float) -> Iterator[None]:
    """Bound the time of what is inside."""
    begun_s = time.monotonic()
    yield
    assert time.monotonic() - begun_s < limit_s


def test_with_the_master_gone_every_call_is_a_miss_at_once(broken: Broken) -> None:
    """No lookup waits, nothing hangs; a new master is found without a restart."""
    known, new = broken.saved(), next(broken.prompts)
    outages, refused = broken.counted("store_outages"), broken.counted("refused_store_calls")
    broken.pool.kill_master()
    for prompt in (known, new, known, new):
        with within(AT_ONCE_S):
            assert broken.ask(*prompt) == 0
        with within(AT_ONCE_S):
            broken.one.settle()
        broken.one.forget_local()
    assert outages() == 1
    assert refused() > 0, "only the first call was made"
    broken.pool.start_master()
    broken.assert_resumes(*new)


@pytest.mark.parametrize("call", ["get", "put"])
def test_a_master_that_dies_during_loads_and_saves_costs_recomputation_only(
    broken: Broken, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed when the call was made and not answered; the engine's requests go on."""
    known, new = broken.saved(), next(broken.prompts)
    calls = count()
    native: Callable[..., Any] = getattr(MooncakeClient, call)

    def killing(client: MooncakeClient, batch: Any) -> list[int]:
        if next(calls) == 0:
            broken.pool.kill_master()
        return native(client, batch)

    monkeypatch.setattr(MooncakeClient, call, killing)
    outages, failed = broken.counted("store_outages"), broken.counted("failed_loads")
    with within(2 * AT_ONCE_S):
        outputs = broken.one.run(known[0], new[0])
        broken.one.settle()
    assert [list(output.outputs[0].token_ids) for output in outputs] == [known[1], new[1]]
    assert next(calls) > 0
    assert outages() == 1
    assert failed() == (call == "get")
    broken.one.forget_local()
    broken.pool.start_master()
    broken.assert_resumes(*new)


def test_with_the_owner_gone_promised_hits_fail_and_are_recomputed(broken: Broken) -> None:
    """The master does not know yet, and promises what the owner held."""
    known, new = broken.saved(), next(broken.prompts)
    failed, jobs = broken.counted("failed_loads"), broken.counted("load_jobs")
    broken.pool.kill_owner()
    with within(LOAD_TIMEOUT_S + AT_ONCE_S):
        assert broken.ask(*known) == 0
    assert failed() == jobs() == 1
    with within(LOAD_TIMEOUT_S + AT_ONCE_S):
        assert broken.ask(*new) == 0
    broken.one.settle()
    broken.one.forget_local()
    broken.pool.start_owner()
    broken.assert_resumes(*known)
    broken.assert_resumes(*new)


def test_a_load_from_an_owner_that_hangs_ends_at_its_timeout(broken: Broken) -> None:
    """The transfer itself is given up by Mooncake later; nobody waits for that."""
    known, new = broken.saved(), next(broken.prompts)
    expired, failed = broken.counted("expired_loads"), broken.counted("failed_loads")
    broken.pool.pause_owner()
    begun_s = time.monotonic()
    assert broken.ask(*known) == 0
    took_s = time.monotonic() - begun_s
    assert LOAD_TIMEOUT_S <= took_s < LOAD_TIMEOUT_S + AT_ONCE_S
    assert expired() == failed() == 1
    with within(AT_ONCE_S):
        assert broken.ask(*new) == 0, "while the last load still hangs"
    with within(SAVE_TIMEOUT_S + AT_ONCE_S):
        broken.one.settle()
    broken.one.forget_local()
    broken.pool.resume_owner()
    broken.assert_resumes(*new)


def test_with_a_master_that_hangs_lookups_are_misses_after_their_wait(broken: Broken) -> None:
    """Only the first call waits for it; then it is lost, until it answers a probe."""
    known, new = broken.saved(), next(broken.prompts)
    outages = broken.counted("store_outages")
    broken.pool.pause_master()
    with within(1.0 + AT_ONCE_S):
        assert broken.ask(*known) == 0
    with within(1.0 + AT_ONCE_S):
        assert broken.ask(*new) == 0
    broken.one.settle()
    broken.one.forget_local()
    assert outages() == 1
    broken.pool.resume_master()
    broken.assert_resumes(*new)


def test_a_value_that_somebody_replaced_is_a_miss_and_is_mended(broken: Broken) -> None:
    """Other bytes under a key: they do not verify, the tokens are computed, and stored again."""
    prompt, want = broken.saved()
    payload_bytes = broken.one.worker._memory.layout.groups[0].payload_bytes
    chunk = 5
    key = key_of(broken.one, prompt, chunk)
    store = open_store(broken.pool.url)
    arena = Arena(store)
    time.sleep(0.5)  # its lease
    assert store.remove([key]) == [Status.OK]
    assert arena.put([(key, value_of("other", payload_bytes + TAG_BYTES))]) == [Status.OK]
    store.close()
    bad = broken.counted("bad_values")
    assert broken.ask(prompt, want) == chunk * BLOCK
    assert bad() == 1
    broken.one.settle()
    broken.one.forget_local()
    broken.assert_resumes(prompt, want)


def key_of(one: InProcessEngine, prompt: list[int], chunk: int) -> str:
    """Return the key of a chunk of a prompt without adapters."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    request = Request(
        request_id="keys",
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=one.core.request_block_hasher,
    )
    side = one.connector._scheduler_side
    [[database]] = side._plan.coordinator().databases(side._namespace_of(request), range(1))
    key: str = database.key_for(request.block_hashes[chunk])
    return key
