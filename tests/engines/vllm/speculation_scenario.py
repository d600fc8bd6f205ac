"""Run as a script: an engine that drafts, two turns of a conversation, as JSON.

usage: python -m tests.engines.vllm.speculation_scenario MODEL STORE_URL SPECULATIVE_CONFIG

In a process of its own: vLLM cannot start another engine in one that has made n-gram drafts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engines.vllm.engines import InProcessEngine, engine, prompt_of
from tests.engines.vllm.environment import report, run_script

N_GRAMS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 4,
    # One token that was seen before is enough; of two, random weights repeat hardly any.
    "prompt_lookup_min": 1,
}


def eagle(draft: Path) -> dict[str, Any]:
    """Drafts of an EAGLE model."""
    return {"method": "eagle", "model": str(draft), "num_speculative_tokens": 2}


def run(model: Path, store: str, speculation: dict[str, Any]) -> dict[str, Any]:
    """Run the scenario; return the answers to both turns, and the hits (see :func:`main`)."""
    result: dict[str, Any] = run_script(
        "speculation_scenario", str(model), store, json.dumps(speculation)
    )
    return result


def main(model: Path, store: str, speculation: dict[str, Any]) -> None:
    """Answer a prompt; ask it again, of the engine's own cache and of the pool; go on."""
    prompt = prompt_of(500)
    options = {"save_decode_cache": True}
    with engine(model, store, options=options, speculative_config=speculation) as one:
        num_drafts = _count_drafts(one)
        [answer] = one.generate(prompt, num_tokens=80)
        one.settle()
        [own] = one.run(prompt, num_tokens=1)
        one.settle()
        one.forget_local()
        [pool] = one.run(prompt)
        one.settle()
        one.forget_local()
        [output] = one.run(prompt + answer)
        report(
            {
                "answer": answer,
                "again": list(pool.outputs[0].token_ids),
                "next_answer": list(output.outputs[0].token_ids),
                "own_hit": own.num_cached_tokens,
                "pool_hit": pool.num_cached_tokens,
                "next_hit": output.num_cached_tokens,
                "num_drafts": num_drafts(),
            }
        )


def _count_drafts(one: InProcessEngine) -> Callable[[], int]:
    """Return what tells how many drafted tokens were given to the model so far."""
    schedule = one.core.scheduler.schedule
    counts: list[int] = []

    def noting(*arguments: Any, **options: Any) -> Any:
        output = schedule(*arguments, **options)
        counts.extend(len(tokens) for tokens in output.scheduled_spec_decode_tokens.values())
        return output

    one.core.scheduler.schedule = noting
    return lambda: sum(counts)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
