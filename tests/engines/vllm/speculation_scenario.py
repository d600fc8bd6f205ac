"""Run as a script: an engine that drafts with n-grams, two turns of a conversation, as JSON.

usage: python -m tests.engines.vllm.speculation_scenario MODEL STORE_URL
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.engines.vllm.engines import engine, prompt_of

SPECULATION = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}


def main(model: Path, store: str) -> None:
    """Answer a prompt, empty the engine's own cache, and answer the next turn."""
    prompt = prompt_of(500)
    options = {"save_decode_cache": True}
    with engine(model, store, options=options, speculative_config=SPECULATION) as one:
        [answer] = one.generate(prompt, num_tokens=80)
        one.settle()
        one.forget_local()
        [output] = one.run(prompt + answer)
        result = {
            "answer": answer,
            "next_answer": list(output.outputs[0].token_ids),
            "num_cached_tokens": output.num_cached_tokens,
        }
    print("RESULT " + json.dumps(result), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
