"""The demo: one prompt through three vLLM engines, to see it loaded instead of recomputed.

*Cold* computes the prompt and saves its KV cache into an empty pool. *Warm*, a process that has
never seen the prompt, loads it from there. *Plain* runs without kvtide: the other two must generate
the same tokens.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from kvtide.engines.vllm import demo_model
from kvtide.engines.vllm.demo_process import build_model, require_vllm, run_engine
from kvtide.engines.vllm.demo_run import BLOCK_SIZE, RunResult, RunSpec
from kvtide.errors import ConfigError, EngineRunError
from kvtide.stores import open_store
from kvtide.stores.url import StoreUrl
from kvtide.units import format_size, parse_size

OUTPUT_TOKENS = 24
"""Fewer would prove little: with random weights the first tokens often agree by chance."""

WARMUP_TOKENS = 2 * BLOCK_SIZE
_STDERR = 2
POOL_SIZE = "512MiB"

Runner = Callable[[RunSpec, Path], RunResult]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DemoReport:
    """What the three engines did; bytes are those of the prompt, times are to the first token."""

    prompt_tokens: int
    loaded_tokens: int
    ttft_cold_s: float
    ttft_warm_s: float
    ttft_plain_s: float
    saved_bytes: int
    loaded_bytes: int
    tokens_equal: bool
    cold_loaded_tokens: int = 0
    """Not 0 where the pool of ``--store`` held the prompt already."""

    def to_json(self) -> str:
        """Return what the table shows as one JSON object."""
        shown = asdict(self)
        del shown["cold_loaded_tokens"]
        return json.dumps(shown)

    def faults(self) -> list[str]:
        """Return why the demo has failed, one sentence each; none where it has succeeded."""
        faults = []
        if not self.tokens_equal:
            faults.append("the three engines generated different tokens")
        if self.loaded_tokens == 0:
            faults.append("the second engine loaded nothing from the pool")
        return faults

    def notes(self) -> list[str]:
        """Return what a reader of the figures has to know, one sentence each."""
        notes = ["Times are single samples of one request on this machine."]
        if self.cold_loaded_tokens:
            notes.append(
                f"The pool held this prompt already ({self.cold_loaded_tokens:,} of its tokens): "
                "'cold' loaded it too."
            )
        elif self.saved_bytes == 0 and self.loaded_tokens:
            notes.append("The pool held this prompt already: 'cold' saved nothing new.")
        return notes


def run_demo(
    *,
    model: str | None = None,
    store: str | None = None,
    prompt_tokens: int = 2048,
    progress: Progress = lambda _: None,
    runner: Runner | None = None,
) -> DemoReport:
    """Run the three engines one after another, which takes about two minutes.

    ``model`` is a folder with a model of one's own (default: a small one with random weights, made
    on first use), ``store`` the URL of a pool (default: a fresh one, removed afterwards), and
    ``runner`` what runs an engine (tests).

    Raises:
        ConfigError: ``store`` is no URL of a pool that several processes can share.
        StoreOpenError: the pool cannot be opened.
        EngineRunError: vLLM is missing, an engine failed, or the prompt does not fit the model;
            logs are kept then, and where the demo is told to stop.
    """
    if runner is None:
        require_vllm()
    if store is not None:
        _check_store(store)
    prompt, warmup = prompts(model, prompt_tokens)
    logs = Path(tempfile.mkdtemp(prefix="kvtide-demo-"))
    pool = "an empty pool: computes the prompt and saves its KV cache"
    if store is not None:
        pool = "the pool of --store: computes what of the prompt it does not hold, and saves that"
    results: dict[str, RunResult] = {}
    with _told_where(logs, progress), _pool(store) as url:
        if model is None and runner is None:
            model = str(_own_model(logs, progress))
        for name, engine_store, what in [
            ("cold", url, pool),
            ("warm", url, "a new process on the same pool: loads it"),
            ("plain", None, "without kvtide: computes it, to compare"),
        ]:
            progress(f"engine {len(results) + 1} of 3, {what} (about 40 s)")
            results[name] = (runner or run_engine)(
                RunSpec(
                    name=name,
                    model=str(model),
                    prompt=prompt,
                    warmup=warmup,
                    output_tokens=OUTPUT_TOKENS,
                    store=engine_store,
                    stats_path=str(logs / f"{name}.stats.json"),
                ),
                logs,
            )
    report = _report(results, prompt_tokens)
    if report.faults():
        progress(f"the engines' logs are in {logs}")
    else:
        shutil.rmtree(logs, ignore_errors=True)
    return report


@contextlib.contextmanager
def _told_where(logs: Path, progress: Progress) -> Iterator[None]:
    """Say where the logs are if the demo is told to stop, by Ctrl-C or a signal."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        progress(f"stopped; the engines' logs are in {logs}")
        raise


def _check_store(url: str) -> None:
    """Open the pool and close it, to say at once what an engine would say in half a minute."""
    if StoreUrl.parse(url).scheme == "memory":
        raise ConfigError(
            f"--store {url}: a memory:// store lives in one process, and the demo runs three: use "
            "for instance --store 'local:///dev/shm/kvtide?size=1GiB'"
        )
    with _hushed():
        open_store(url).close()


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Hold back what native code says on stderr, unless it fails: then its lines tell why."""
    with tempfile.TemporaryFile() as said:
        sys.stderr.flush()
        stderr = os.dup(_STDERR)
        os.dup2(said.fileno(), _STDERR)
        try:
            yield
        except BaseException:
            said.seek(0)
            os.write(stderr, said.read())
            raise
        finally:
            os.dup2(stderr, _STDERR)
            os.close(stderr)


def _own_model(logs: Path, progress: Progress) -> Path:
    """Return the folder of the demo's own model, saying so where it has to be made."""
    folder = demo_model.model_folder()
    if not demo_model.is_built(folder):
        progress("making a small model with random weights (first time only, about 10 s)")
        build_model(folder, logs)
    return folder


def _report(results: dict[str, RunResult], prompt_tokens: int) -> DemoReport:
    """Put the three results beside each other."""
    cold, warm, plain = results["cold"], results["warm"], results["plain"]
    return DemoReport(
        prompt_tokens=prompt_tokens,
        loaded_tokens=warm.loaded_tokens,
        ttft_cold_s=cold.ttft_s,
        ttft_warm_s=warm.ttft_s,
        ttft_plain_s=plain.ttft_s,
        saved_bytes=cold.saved_bytes,
        loaded_bytes=warm.loaded_bytes,
        tokens_equal=cold.tokens == warm.tokens == plain.tokens
        and len(plain.tokens) == OUTPUT_TOKENS,
        cold_loaded_tokens=cold.loaded_tokens,
    )


def prompts(model: str | None, prompt_tokens: int) -> tuple[list[int], list[int]]:
    """Return the prompt and the warm-up prompt as token ids, the same in every run.

    ``model`` is a folder, or ``None`` for the demo's own model.

    They share no block, so that the warm-up leaves nothing behind that the prompt could load.

    Raises:
        EngineRunError: the model's configuration cannot be read, or the prompt is too long for it.
    """
    vocabulary, longest = demo_model.VOCABULARY, demo_model.MAX_TOKENS
    if model is not None:
        vocabulary, longest = _model_limits(Path(model))
    if prompt_tokens + OUTPUT_TOKENS > longest:
        raise EngineRunError(
            f"a prompt of {prompt_tokens} tokens and {OUTPUT_TOKENS} to generate do not fit the "
            f"model's {longest}: use --prompt-tokens {longest - OUTPUT_TOKENS} or less"
        )

    def draw(seed: int, length: int) -> list[int]:
        generator = random.Random(seed)  # noqa: S311 - the same numbers each time is the point
        return [generator.randrange(3, vocabulary) for _ in range(length)]

    return draw(20, prompt_tokens), draw(21, WARMUP_TOKENS)


def _model_limits(folder: Path) -> tuple[int, int]:
    """Return the model's vocabulary size and its longest sequence in tokens."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineRunError(
            f"--model must be the folder of a model, with a config.json in it: {error}"
        ) from None
    config = config.get("text_config", config)
    return int(config["vocab_size"]), int(config.get("max_position_embeddings", 1 << 20))


@contextlib.contextmanager
def _pool(store: str | None) -> Iterator[str]:
    """Give the URL of the pool to use; one that was made here is removed afterwards."""
    if store is not None:
        yield store
        return
    # Memory is faster and leaves no trace, but /dev/shm is often just 64 MiB in a container.
    memory, room = Path("/dev/shm"), parse_size(POOL_SIZE) * 5 // 4  # noqa: S108
    roomy = memory.is_dir() and shutil.disk_usage(memory).free >= room
    with tempfile.TemporaryDirectory(prefix="kvtide-demo-", dir=memory if roomy else None) as made:
        yield f"local://{made}/pool?size={POOL_SIZE}"


def table_rows(report: DemoReport) -> list[tuple[str, str]]:
    """Return what the table shows, as pairs of a name and a value."""
    ratio = report.ttft_cold_s / report.ttft_warm_s if report.ttft_warm_s else 0.0
    return [
        ("prompt tokens", f"{report.prompt_tokens:,}"),
        ("tokens loaded from the pool", f"{report.loaded_tokens:,}"),
        ("time to first token, plain vLLM", f"{report.ttft_plain_s * 1e3:,.0f} ms"),
        ("time to first token, cold pool", f"{report.ttft_cold_s * 1e3:,.0f} ms"),
        (
            "time to first token, warm pool",
            f"{report.ttft_warm_s * 1e3:,.0f} ms ({ratio:.1f}x as fast as cold)",
        ),
        ("saved by the first engine", format_size(report.saved_bytes)),
        ("loaded by the second engine", format_size(report.loaded_bytes)),
        (
            f"the {OUTPUT_TOKENS} output tokens of all three",
            "equal" if report.tokens_equal else "DIFFERENT",
        ),
    ]
