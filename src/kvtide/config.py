"""The configuration of a pool: every option, what it accepts, and what to do when it does not.

Options come from the engine (vLLM: ``kv_connector_extra_config``). Each is a field of
:class:`PoolConfig` that carries its own documentation, unit and check as metadata, so that
``docs/configuration.md`` and the error messages are made from the same words.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Final

from kvtide.errors import ConfigError
from kvtide.units import format_size, parse_size

ROLES: Final = ("kv_both", "kv_producer", "kv_consumer")
KEY_FORMATS: Final = ("kvtide", "vllm")

_STORE_TP_SIZE: Final = (
    "remove it, and give store_tp_size, a common multiple of all tensor parallel sizes"
)

# Options of vLLM's in-tree store connectors that people will bring along, and what became of them.
_ELSEWHERE: Final = {
    "load_async": "loads are always asynchronous; remove it",
    "lookup_async": "lookups are always asynchronous; remove it",
    "global_segment_size": "give it in the store's URL; remove it here",
    "local_buffer_size": "give it in the store's URL; remove it here",
    "master_server_address": "name it in the store's URL, mooncake://HOST:PORT; remove it here",
    "protocol": "give it in the store's URL; remove it here",
    "preferred_segment": "give it in the store's URL; remove it here",
    "enable_lookup": "to load nothing, set min_load_tokens above the longest prompt; remove it",
    "enable_group_semantics": "kvtide does not group values; remove it",
    "custom_mem_pool": "kvtide copies through memory of its own; remove it",
    "enable_store_tp_lcm": _STORE_TP_SIZE,
    "prefill_tp_sizes": _STORE_TP_SIZE,
    "store_tp": _STORE_TP_SIZE,
    "tensor_parallel_size": (
        "it is vLLM's own, --tensor-parallel-size; remove it. To share among sizes give "
        "store_tp_size"
    ),
}


class _FaultError(ValueError):
    """What a value should have been, as the second half of a sentence."""


Check = Callable[[Any], Any]
"""Takes the value as written, returns the value to keep, raises :class:`_FaultError`."""


def _number(low: float, high: float = math.inf, *, above: bool = False) -> Check:
    """Accept a number in ``[low, high]``, or in ``(low, high]`` with ``above``."""
    bound = f"above {low:g}" if above else f"of at least {low:g}"
    accepted = f"a number {bound}" + ("" if high == math.inf else f" and at most {high:g}")

    def check(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _FaultError(accepted)
        try:
            number = float(value)
        except OverflowError:
            raise _FaultError(accepted) from None
        if not math.isfinite(number) or not low <= number <= high or (above and number == low):
            raise _FaultError(accepted)
        return number

    return check


def _integer(low: int) -> Check:
    """Accept an integer of at least ``low``; ``True`` is none, nor is ``1.0``."""

    def check(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            is_number = isinstance(value, str) and value.strip().isdigit()
            hint = f" without quotes: {str(value).strip()}" if is_number else ""
            raise _FaultError(f"an integer of at least {low}{hint}")
        return value

    return check


def _size(low: int) -> Check:
    """Accept a size of at least ``low`` bytes, as a string with a unit or a number of bytes."""
    accepted = f"a size of at least {format_size(low)}, such as '256MiB' or a number of bytes"

    def check(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise _FaultError(accepted)
        try:
            size = parse_size(value) if isinstance(value, str) else value
        except ValueError as error:
            raise _FaultError(f"{accepted} ({error})") from None
        if size < low:
            raise _FaultError(accepted)
        return size

    return check


def _flag(value: object) -> bool:
    if isinstance(value, str) and value.strip().lower() in {"true", "false"}:
        raise _FaultError(f"true or false without quotes: {value.strip().lower()}")
    if not isinstance(value, bool):
        raise _FaultError("true or false")
    return value


def _text(accepted: str, pattern: str) -> Check:
    """Accept a string that ``pattern`` matches as a whole."""
    compiled = re.compile(pattern)

    def check(value: object) -> str:
        if not isinstance(value, str) or compiled.fullmatch(value) is None:
            raise _FaultError(accepted)
        return value

    return check


def _key_format(value: object) -> str:
    if value not in KEY_FORMATS:
        raise _FaultError("'kvtide' or 'vllm'")
    return str(value)


_NAME: Final = r"[A-Za-z0-9._/-]{0,128}"
_NAME_ACCEPTED: Final = "up to 128 letters, digits, '.', '_', '-' or '/'"
_VERSION: Final = _NAME + r"|@/[^\0]+"
_VERSION_ACCEPTED: Final = _NAME_ACCEPTED + "; or '@/path' of a file that holds a name"
_URL_ACCEPTED: Final = (
    "a URL such as 'local:///dev/shm/kvtide?size=20GiB' or 'mooncake://HOST:PORT'"
)


def _option(default: object, unit: str, accepts: str, check: Check, doc: str) -> Any:  # noqa: ANN401
    """Declare an option: ``accepts`` and ``doc`` are what the documentation shows."""
    return field(
        default=check(default),
        metadata={
            "default": default,
            "unit": unit,
            "accepts": accepts,
            "check": check,
            "doc": doc,
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """The options of a pool, checked; build it with :meth:`from_mapping`.

    Durations end in their unit (``_s``, ``_ms``); sizes are held in bytes.
    """

    kv_role: str = "kv_both"
    store: str = _option(
        "local:///dev/shm/kvtide",
        "",
        "a store URL",
        _text(_URL_ACCEPTED, r"[a-z][a-z0-9+.-]*://\S*"),
        "Where the KV cache goes: the URL of a store, whose scheme chooses its kind.",
    )
    cache_prefix: str = _option(
        "",
        "",
        _NAME_ACCEPTED,
        _text(_NAME_ACCEPTED, _NAME),
        "Text at the head of every key: deployments with different prefixes share nothing.",
    )
    weights_version: str = _option(
        "",
        "",
        _VERSION_ACCEPTED,
        _text(_VERSION_ACCEPTED, _VERSION),
        "Names the weights now served, in place of a digest of the model's files. Only a file can "
        "name new weights: it is read again at each reset of the cache, and engines that read the "
        "same name from the same path share. Without a file an engine that was reset takes a "
        "random name, and shares nothing from before.",
    )
    key_format: str = _option(
        "kvtide",
        "",
        "kvtide or vllm",
        _key_format,
        "The form of keys and values. `vllm` is that of vLLM's own MooncakeStoreConnector, to "
        "share a pool with it: its keys do not say what the bytes are, so the operator must see to "
        "it that all who share the pool serve the same weights with the same settings. See "
        "[Moving from vLLM's Mooncake connector](moving-from-vllm-mooncake.md).",
    )
    store_tp_size: int = _option(
        0,
        "ranks",
        "an integer of at least 0",
        _integer(0),
        "Share the pool among engines of different tensor parallel sizes: a common multiple of "
        "them all, the same in each. Values are then stored cut by KV heads as ranks of that size "
        "have them. Setting or changing it starts cold. 0: engines of another size share nothing. "
        "See [Many ranks](ranks.md).",
    )
    save_decode_cache: bool = _option(
        False,  # noqa: FBT003
        "",
        "true or false",
        _flag,
        "Save the KV cache of generated tokens too, not only that of prompts. A model with windows "
        "or states needs `--prefix-cache-retention-interval` too: vLLM's default keeps none there.",
    )
    decode_portion_tokens: int = _option(
        0,
        "tokens",
        "an integer of at least 0",
        _integer(0),
        "With `save_decode_cache`: save so many generated tokens at a time, in whole blocks, and "
        "the rest when the request ends, unless saving backs off or has no room then. 128 costs "
        "the engine and the store less than 0, each block as it is complete. But until then nobody "
        "else has them, and a request that ends holds blocks until they are copied: a reset of the "
        "prefix cache within some milliseconds answers `False`. Of models with windows or states "
        "fewer are put off or none, and none where vLLM runs in its caller's process.",
    )
    min_load_tokens: int = _option(
        0,
        "tokens",
        "an integer of at least 0",
        _integer(0),
        "Do not load a hit that saves fewer tokens than this: recomputing them is faster.",
    )
    pin_fraction: float = _option(
        0.1,
        "fraction",
        "above 0, at most 0.5",
        _number(0, 0.5, above=True),
        "The share of the engine's KV-cache blocks that saving may hold back at any one time.",
    )
    staging_size: int = _option(
        "256MiB",
        "bytes",
        "a size of at least 1MiB",
        _size(1 << 20),
        "Memory per worker in which saved blocks wait for the store; loads take as much again.",
    )
    save_timeout_s: float = _option(
        30,
        "seconds",
        "above 0",
        _number(0, above=True),
        "A save that waited this long for the store is given up.",
    )
    load_timeout_s: float = _option(
        3,
        "seconds",
        "above 0",
        _number(0, above=True),
        "A load that makes no progress for this long has failed, and its tokens are recomputed.",
    )
    max_load_bytes: int = _option(
        "1GiB",
        "bytes",
        "a size of at least 1MiB",
        _size(1 << 20),
        "The bytes that loads in flight may add up to; beyond it a hit is not promised.",
    )
    max_loads_in_flight: int = _option(
        64,
        "requests",
        "an integer of at least 1",
        _integer(1),
        "The requests that may be loading at one time; beyond it a hit is not promised.",
    )
    lookup_wait_ms: float = _option(
        50,
        "milliseconds",
        "at least 0",
        _number(0),
        "How long a request may wait for its lookup before it counts as a miss. A lookup that has "
        "found something is waited for until it has found nothing more for as long.",
    )
    lookup_timeout_ms: float = _option(
        1000,
        "milliseconds",
        "above 0",
        _number(0, above=True),
        "A lookup that has found nothing for this long is abandoned, and in any case after ten "
        "times as long.",
    )
    backoff_s: float = _option(
        0.5,
        "seconds",
        "above 0",
        _number(0, above=True),
        "The first pause after a save failed, or a load lost its store; it doubles with each "
        "further failure.",
    )
    max_backoff_s: float = _option(
        1,
        "seconds",
        "above 0",
        _number(0, above=True),
        "The longest pause after failed saves. A try that fails costs little, and saving resumes "
        "no later than this after the store has room, or is back.",
    )
    max_load_backoff_s: float = _option(
        30,
        "seconds",
        "above 0",
        _number(0, above=True),
        "The longest pause of loading, after loads whose store was lost or hung. The first is "
        "`backoff_s` long; a try that fails costs a request up to `load_timeout_s`.",
    )
    max_bad_keys: int = _option(
        65536,
        "keys",
        "an integer of at least 1",
        _integer(1),
        "How many keys whose value did not verify are remembered, so as not to promise them again.",
    )
    flush_timeout_s: float = _option(
        4.0,
        "seconds",
        "at least 0, at most 60",
        _number(0, 60),
        "How long a worker that is told to stop goes on storing what is staged. vLLM kills its "
        "workers after 5 seconds.",
    )
    stats_path: str = _option(
        "",
        "",
        "an absolute path without NUL, or nothing",
        _text("an absolute path, such as '/tmp/kvtide.json', or ''", r"(?:/[^\0]+)?"),
        "A file that the scheduler side keeps up to date with its counters, as JSON, from "
        "its start on. Of data parallel engines the first writes there, engine N to a file whose "
        "name ends in `.dpN`.",
    )

    @classmethod
    def from_mapping(
        cls, extra_config: Mapping[str, object], kv_role: str | None = "kv_both"
    ) -> PoolConfig:
        """Check ``extra_config`` as a whole and return the configuration it means.

        Raises:
            ConfigError: names every fault at once: settings that do not exist, values that are
                not accepted, and values that contradict each other.
        """
        faults: list[str] = []
        if kv_role not in ROLES:
            faults.append(f"kv_role must be one of {', '.join(ROLES)}, but is {kv_role!r}")
        known = {option.name: option for option in options()}
        values: dict[str, Any] = {}
        for name, value in extra_config.items():
            option = known.get(name)
            if option is None:
                faults.append(_unknown(name, list(known)))
                continue
            try:
                values[name] = option.metadata["check"](value)
            except _FaultError as fault:
                faults.append(f"{name} must be {fault}, but is {value!r}")
        bad = set(extra_config) - set(values)
        faults += _contradictions(cls(**values), bad)
        if faults:
            raise ConfigError(faults)
        return cls(kv_role=str(kv_role), **values)

    @property
    def saves_prefill(self) -> bool:
        """Whether the KV cache of prompts is saved; a consumer only loads."""
        return self.kv_role != "kv_consumer"

    @property
    def saves(self) -> bool:
        """Whether anything is saved at all."""
        return self.saves_prefill or self.save_decode_cache


def options() -> list[Field[Any]]:
    """Return the options in the order in which the documentation shows them.

    Each field's ``metadata`` has ``doc``, ``unit``, ``accepts``, ``check`` and ``default``, the
    last as a user would write it.
    """
    return [option for option in fields(PoolConfig) if "check" in option.metadata]


def _unknown(name: object, known: list[str]) -> str:
    """Say that a setting does not exist, and which one was probably meant."""
    if name in _ELSEWHERE:
        return f"{name} is not a setting of kvtide: {_ELSEWHERE[str(name)]}"
    near = difflib.get_close_matches(str(name).lower().replace("-", "_"), known, n=1, cutoff=0.6)
    if near:
        return f"{name} is not a setting; did you mean {near[0]}?"
    return f"{name} is not a setting; remove it, or use one of {', '.join(sorted(known))}"


def _contradictions(config: PoolConfig, bad: set[str]) -> list[str]:
    """Return the faults of values that are fine by themselves, leaving out those in ``bad``."""
    pairs = [
        ("backoff_s", "max_backoff_s", "the first pause is longer than the longest"),
        ("lookup_wait_ms", "lookup_timeout_ms", "a request would wait for an abandoned lookup"),
    ]
    faults = [
        f"{low} ({getattr(config, low):g}) must be at most {high} ({getattr(config, high):g}): "
        f"{reason}; lower {low} or raise {high}"
        for low, high, reason in pairs
        if not bad & {low, high} and getattr(config, low) > getattr(config, high)
    ]
    if config.key_format == "vllm" and config.store_tp_size:
        faults.append(
            "store_tp_size cannot be used with key_format 'vllm', which does not cut values: "
            "remove store_tp_size, or remove key_format and start a pool of kvtide's own keys"
        )
    if config.key_format == "vllm" and config.weights_version:
        faults.append(
            "weights_version is no part of keys of key_format 'vllm': remove it, and give each "
            "version of the weights a cache_prefix of its own"
        )
    return faults
