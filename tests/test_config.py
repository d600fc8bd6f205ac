"""The configuration: what is accepted, and that every refusal says what to change."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.config import PoolConfig, options
from kvtide.errors import ConfigError, UnsupportedModelError

# Per case: the settings, the role, and for each fault the words that its sentence must have.
BAD: list[tuple[dict[str, Any], str | None, list[list[str]]]] = [
    ({"stor": "memory://"}, "kv_both", [["stor is not a setting", "did you mean store?"]]),
    ({"Store": "memory://"}, "kv_both", [["did you mean store?"]]),
    ({"save-decode-cache": True}, "kv_both", [["did you mean save_decode_cache?"]]),
    ({"lookup_timeout": 5}, "kv_both", [["did you mean lookup_timeout_ms?"]]),
    ({"xyzzy": 1}, "kv_both", [["xyzzy is not a setting", "remove it", "cache_prefix"]]),
    ({"load_async": True}, "kv_both", [["load_async", "always asynchronous", "remove it"]]),
    ({"protocol": "tcp"}, "kv_both", [["protocol", "store's URL"]]),
    ({"store": ""}, "kv_both", [["store must be a URL", "local:///dev/shm/kvtide", "''"]]),
    ({"store": "/dev/shm/kvtide"}, "kv_both", [["store must be a URL"]]),
    ({"store": None}, "kv_both", [["store must be a URL", "None"]]),
    ({"store": "local:// x"}, "kv_both", [["store must be a URL"]]),
    ({"cache_prefix": "a b"}, "kv_both", [["cache_prefix must be", "letters, digits", "'a b'"]]),
    ({"cache_prefix": "a@b"}, "kv_both", [["cache_prefix must be"]]),
    ({"cache_prefix": "a\n"}, "kv_both", [["cache_prefix must be"]]),
    ({"cache_prefix": 7}, "kv_both", [["cache_prefix must be", "but is 7"]]),
    ({"weights_version": "v" * 129}, "kv_both", [["weights_version must be up to 128"]]),
    ({"weights_version": "@version"}, "kv_both", [["weights_version must be", "'@/path'"]]),
    ({"weights_version": "@/a\0b"}, "kv_both", [["weights_version must be", "'@/path'"]]),
    ({"key_format": "lmcache"}, "kv_both", [["key_format must be 'kvtide' or 'vllm'"]]),
    ({"key_format": ["vllm"]}, "kv_both", [["key_format must be 'kvtide' or 'vllm'"]]),
    (
        {"key_format": "vllm", "weights_version": "r7"},
        "kv_both",
        [["weights_version is no part of keys", "cache_prefix of its own"]],
    ),
    ({"store_tp_size": "8"}, "kv_both", [["store_tp_size must be", "without quotes: 8"]]),
    ({"store_tp_size": -1}, "kv_both", [["store_tp_size must be an integer of at least 0"]]),
    ({"store_tp": 8}, "kv_both", [["store_tp is not a setting", "give store_tp_size"]]),
    ({"tensor_parallel_size": 8}, "kv_both", [["--tensor-parallel-size", "give store_tp_size"]]),
    ({"enable_store_tp_lcm": True}, "kv_both", [["remove it, and give store_tp_size"]]),
    (
        {"key_format": "vllm", "store_tp_size": 8},
        "kv_both",
        [["store_tp_size cannot be used", "remove store_tp_size, or remove key_format"]],
    ),
    ({"enable_lookup": False}, "kv_both", [["enable_lookup", "set min_load_tokens above"]]),
    ({"save_decode_cache": "true"}, "kv_both", [["save_decode_cache", "without quotes: true"]]),
    ({"save_decode_cache": "False"}, "kv_both", [["save_decode_cache", "without quotes: false"]]),
    ({"save_decode_cache": 1}, "kv_both", [["save_decode_cache must be true or false"]]),
    ({"min_load_tokens": -1}, "kv_both", [["min_load_tokens must be an integer of at least 0"]]),
    ({"min_load_tokens": 1.5}, "kv_both", [["min_load_tokens must be an integer"]]),
    ({"min_load_tokens": True}, "kv_both", [["min_load_tokens must be an integer", "True"]]),
    ({"pin_fraction": 0}, "kv_both", [["pin_fraction must be a number above 0 and at most 0.5"]]),
    ({"pin_fraction": 0.6}, "kv_both", [["pin_fraction", "at most 0.5", "0.6"]]),
    ({"pin_fraction": float("nan")}, "kv_both", [["pin_fraction must be a number", "nan"]]),
    ({"pin_fraction": "10%"}, "kv_both", [["pin_fraction must be a number"]]),
    ({"staging_size": "256M"}, "kv_both", [["staging_size", "write 256MiB or 256MB"]]),
    ({"staging_size": "1KiB"}, "kv_both", [["staging_size must be a size of at least 1MiB"]]),
    ({"staging_size": 1.5e9}, "kv_both", [["staging_size must be a size"]]),
    ({"staging_size": True}, "kv_both", [["staging_size must be a size"]]),
    ({"max_load_bytes": "lots"}, "kv_both", [["max_load_bytes must be a size", "'20GiB'"]]),
    ({"save_timeout_s": 0}, "kv_both", [["save_timeout_s must be a number above 0"]]),
    ({"load_timeout_s": "30s"}, "kv_both", [["load_timeout_s must be a number above 0", "'30s'"]]),
    ({"load_timeout_s": float("inf")}, "kv_both", [["load_timeout_s must be a number above 0"]]),
    ({"max_loads_in_flight": 0}, "kv_both", [["max_loads_in_flight", "at least 1"]]),
    ({"max_bad_keys": "many"}, "kv_both", [["max_bad_keys must be an integer"]]),
    ({"lookup_wait_ms": -1}, "kv_both", [["lookup_wait_ms must be a number of at least 0"]]),
    ({"lookup_timeout_ms": 0}, "kv_both", [["lookup_timeout_ms must be a number above 0"]]),
    ({"flush_timeout_s": 61}, "kv_both", [["flush_timeout_s", "at most 60"]]),
    ({"stats_path": "stats.json"}, "kv_both", [["stats_path must be an absolute path"]]),
    (
        {"backoff_s": 60},
        "kv_both",
        [["backoff_s (60) must be at most max_backoff_s (1)", "raise max_backoff_s"]],
    ),
    (
        {"lookup_wait_ms": 2000},
        "kv_both",
        [["lookup_wait_ms (2000) must be at most lookup_timeout_ms (1000)", "lower"]],
    ),
    ({}, "kv_reader", [["kv_role must be one of kv_both", "'kv_reader'"]]),
    ({}, None, [["kv_role must be one of kv_both", "None"]]),
    (
        {"stor": "memory://", "pin_fraction": 2, "backoff_s": 60, "staging_size": "1G"},
        "both",
        [["kv_role"], ["stor "], ["pin_fraction"], ["staging_size"], ["backoff_s (60)"]],
    ),
    # A value that is not accepted contradicts nothing: only the first fault is known.
    ({"backoff_s": 60, "max_backoff_s": -1}, "kv_both", [["max_backoff_s must be"]]),
]


@pytest.mark.parametrize("extra,role,faults", BAD, ids=[str(case[0])[:48] for case in BAD])
def test_a_bad_configuration_is_refused_with_all_its_faults(
    extra: dict[str, Any], role: str | None, faults: list[list[str]]
) -> None:
    """One error names every fault, each with its setting and the remedy, and no others."""
    with pytest.raises(ConfigError) as caught:
        PoolConfig.from_mapping(extra, role)
    assert len(caught.value.faults) == len(faults)
    for words in faults:
        assert any(all(word in fault for word in words) for fault in caught.value.faults), words
    for fault in caught.value.faults:
        assert fault in str(caught.value)


def test_the_message_counts_what_is_wrong_by_its_kind() -> None:
    """What a model is, is no setting; a single fault is the whole message."""
    assert str(ConfigError(["a", "b"])) == "2 settings are wrong:\n  1. a\n  2. b"
    refusal = str(UnsupportedModelError(["a", "b"]))
    assert refusal == "2 things stand against this model or how it is run:\n  1. a\n  2. b"
    assert str(UnsupportedModelError(["a"])) == "a"


def test_no_settings_give_the_defaults() -> None:
    """An empty mapping is a valid configuration, and it equals a bare ``PoolConfig()``."""
    config = PoolConfig.from_mapping({}, "kv_both")
    assert config == PoolConfig()
    assert config.store == "local:///dev/shm/kvtide"
    assert config.staging_size == 256 << 20
    assert config.max_load_bytes == 1 << 30


def test_values_are_kept_in_their_units() -> None:
    """Sizes become bytes and whole numbers of seconds become floats."""
    config = PoolConfig.from_mapping(
        {"staging_size": "1GiB", "load_timeout_s": 5, "pin_fraction": 0.5}, "kv_both"
    )
    assert config.staging_size == 1 << 30
    assert isinstance(config.load_timeout_s, float)
    assert config.pin_fraction == 0.5


@pytest.mark.parametrize(
    "role,decode,prefill,saves",
    [
        ("kv_both", False, True, True),
        ("kv_producer", False, True, True),
        ("kv_consumer", False, False, False),
        ("kv_consumer", True, False, True),
    ],
)
def test_a_consumer_saves_decode_at_most(
    role: str, decode: bool, prefill: bool, saves: bool
) -> None:
    """Consumers never save prompts; with ``save_decode_cache`` they save what they generate."""
    config = PoolConfig.from_mapping({"save_decode_cache": decode}, role)
    assert (config.saves_prefill, config.saves) == (prefill, saves)


def test_every_option_documents_itself() -> None:
    """Each option has a sentence, what it accepts, and a default that its own check accepts."""
    for option in options():
        metadata = option.metadata
        assert metadata["doc"].endswith("."), option.name
        assert metadata["accepts"], option.name
        assert metadata["check"](metadata["default"]) == option.default, option.name


_values = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(["x"])


@given(st.dictionaries(st.sampled_from([o.name for o in options()]) | st.text(), _values))
def test_any_mapping_is_accepted_or_refused_with_a_config_error(extra: dict[str, Any]) -> None:
    """Nothing that JSON can hold raises anything else."""
    try:
        PoolConfig.from_mapping(extra, "kv_both")
    except ConfigError as error:
        assert error.faults  # noqa: PT017 - either outcome is fine, a third is not


def test_the_form_of_keys_is_one_of_two() -> None:
    """That of kvtide, unless the operator asks for vLLM's."""
    assert PoolConfig().key_format == "kvtide"
    assert PoolConfig.from_mapping({"key_format": "vllm"}).key_format == "vllm"


@pytest.mark.parametrize("version", ["", "r7", "org/model-2.1", "@/etc/kvtide/version"])
def test_weights_are_named_by_a_name_or_by_a_file(version: str) -> None:
    """The file is named by its absolute path, after an @."""
    assert PoolConfig.from_mapping({"weights_version": version}).weights_version == version
