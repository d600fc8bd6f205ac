"""With a store that fails in every way, vLLM answers as without kvtide, and never stands still."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvtide.testing import Fault, FaultKind, FaultyStore
from tests.engines.vllm.engines import BLOCK, InProcessEngine, engine, one_request, prompt_of

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

K = FaultKind


@dataclass(frozen=True)
class Case:
    """A fault, and whether any put can succeed under it."""

    name: str
    script: tuple[Fault, ...]
    saves: bool

    def __str__(self) -> str:
        return self.name


def case(kind: FaultKind, method: str | None = None, *, saves: bool = True, **how: Any) -> Case:
    """One rule that speaks about every call."""
    name = f"{kind.value}-{method or 'all'}" + "".join(f"-{key}" for key in how)
    return Case(name, (Fault(kind, method, **how),), saves)


CASES = [
    case(K.LOST, "exists", saves=False),
    case(K.LOST, "put", saves=False),
    case(K.LOST, "get"),
    # Nothing is removed while every value verifies, so one that does not leads to the call.
    Case("lost-remove", (Fault(K.FLIPPED, "get"), Fault(K.LOST, "remove")), saves=True),
    case(K.LOST, saves=False),
    case(K.DELAY, delay_s=0.3),
    case(K.HANG, "exists", saves=False),
    case(K.HANG, "put", saves=False),
    case(K.HANG, "get"),
    case(K.FAILED, "exists"),
    case(K.FAILED, "put", saves=False),
    case(K.FAILED, "get"),
    case(K.NO_SPACE, saves=False),
    case(K.VANISHED, saves=False),
    case(K.SHORT),
    case(K.FLIPPED),
    Case("flipped-and-not-removable", (Fault(K.FLIPPED), Fault(K.FAILED, "remove")), saves=True),
]
PROMPT_TOKENS = 400
EXPECTED_LOAD = PROMPT_TOKENS // BLOCK * BLOCK

OPTIONS = {
    "lookup_timeout_ms": 1000,
    "save_timeout_s": 1.0,
    "load_timeout_s": 1.0,
    "backoff_s": 0.1,
    "max_backoff_s": 0.2,
    "max_load_backoff_s": 0.2,
    "flush_timeout_s": 1.0,
}


def prompt_for(number: int) -> list[int]:
    """A prompt that no other case uses."""
    return prompt_of(PROMPT_TOKENS, seed=1000 + number)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """What an engine without kvtide answers to each case's prompt."""
    with engine(model, None) as plain:
        return [plain.generate(prompt_for(number))[0] for number in range(len(CASES))]


@pytest.fixture(scope="module", params=["large", "one-request"])
def faulty(
    model: Path,
    request: pytest.FixtureRequest,
    expected: list[list[int]],  # first: one process runs one engine at a time
) -> Iterator[tuple[Any, FaultyStore]]:
    """An engine over a store whose script each test replaces; once with room for one request."""
    import kvtide_faulty

    arguments = one_request(480) if request.param == "one-request" else {}
    name = f"faults-{request.param}"
    with engine(model, f"faulty://{name}", options=OPTIONS, **arguments) as opened:
        store = kvtide_faulty.opened[name]
        yield opened, store
        store.script = ()
        store.release()


def heal(one: InProcessEngine, store: FaultyStore) -> None:
    """End the fault, and wait until what hung has ended and back-off is over."""
    store.script = ()
    store.release()
    one.settle()
    one.step_until(lambda: not one.worker.usage().total())
    time.sleep(OPTIONS["max_backoff_s"])


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
def test_a_fault_costs_recomputation_only(
    faulty: tuple[InProcessEngine, FaultyStore], expected: list[list[int]], number: int
) -> None:
    """Twice the same prompt: equal tokens, pins back to zero, at most two loads, then health."""
    one, store = faulty
    fault, prompt, want = CASES[number], prompt_for(number), expected[number]
    before, injected = one.counters, store.injected.total()
    one.most_pinned = 0

    store.script = fault.script
    assert one.generate(prompt) == [want]
    assert 0 < one.most_pinned <= max(one.pin_budget, 1)
    one.step_until(lambda: not one.pool.has_pins, limit_s=20.0)
    one.forget_local()
    jobs_before = one.counters["load_jobs"]
    assert one.generate(prompt) == [want]
    one.step_until(lambda: not one.pool.has_pins, limit_s=20.0)
    # Even a call that hangs ends its jobs: by their deadline.
    one.settle()
    assert one.counters["load_jobs"] - jobs_before <= 2
    assert store.injected.total() > injected, "a fault that never happened proves nothing"
    saved = one.counters["saved_bytes"] - before["saved_bytes"]
    assert (saved > 0) == fault.saves

    heal(one, store)
    one.pool.check_integrity()
    one.worker.check_idle()
    one.forget_local()
    assert one.generate(prompt) == [want], "a healthy store again"
    one.settle()
    one.forget_local()
    [output] = one.run(prompt)
    assert list(output.outputs[0].token_ids) == want
    assert output.num_cached_tokens > 0, "saving and loading have resumed"
    one.settle()
    one.forget_local()


@pytest.mark.parametrize("chunk", [0, EXPECTED_LOAD // BLOCK - 1], ids=["first", "last"])
def test_loads_that_always_fail_at_one_key_cost_two_loads_at_most(
    faulty: tuple[InProcessEngine, FaultyStore], expected: list[list[int]], chunk: int
) -> None:
    """The second answer ends before the chunk that failed."""
    one, store = faulty
    heal(one, store)
    prompt, want = prompt_for(0), expected[0]
    assert one.generate(prompt) == [want]
    one.settle()
    one.forget_local()
    hashes = hashes_of(one, prompt)
    store.script = (
        Fault(FaultKind.FAILED, "get", keys=lambda key: key.endswith(hashes[chunk].hex())),
    )
    before = one.counters
    [output] = one.run(prompt)
    assert list(output.outputs[0].token_ids) == want
    num_loads = one.counters["load_jobs"] - before["load_jobs"]
    if one.counters["promises_withdrawn"] > before["promises_withdrawn"]:
        # vLLM never admits a second load where its cache holds just one request.
        assert (num_loads, output.num_cached_tokens) == (1, 0)
    else:
        assert num_loads == (2 if chunk else 1)
        assert output.num_cached_tokens == chunk * BLOCK
    heal(one, store)
    one.forget_local()


def hashes_of(one: InProcessEngine, prompt: list[int]) -> list[bytes]:
    """The block hashes vLLM gives a prompt."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    request = Request(
        request_id="hashes",
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=one.core.request_block_hasher,
    )
    return list(request.block_hashes)
