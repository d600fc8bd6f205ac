"""kvtide's log lines look like log lines beside vLLM's."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvtide.engines.vllm.logs import log_as_vllm_does


@contextmanager
def fresh_loggers(patch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Loggers as in a process that vLLM alone set logging up in, and where it writes.

    Within the test's body: before it, pytest gives the root logger handlers of its own.
    """
    stream = io.StringIO()
    ours, theirs = logging.getLogger("kvtide"), logging.getLogger("vllm")
    level = ours.level
    ours.setLevel(logging.NOTSET)
    with patch.context() as within:
        within.setattr(theirs, "handlers", [logging.StreamHandler(stream)])
        within.setattr(theirs, "level", logging.INFO)
        within.setattr(logging.getLogger(), "handlers", [])
        within.setattr(ours, "handlers", [])
        yield stream
    ours.setLevel(level)


def test_lines_have_a_level_a_time_and_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """At vLLM's level, once, however many connectors a process has."""
    with fresh_loggers(monkeypatch) as stream:
        log_as_vllm_does()
        log_as_vllm_does()
        logging.getLogger("kvtide.stores").info("the pool is back")
        logging.getLogger("kvtide.stores").debug("not shown")
    line = r"INFO \d\d-\d\d [\d:]{8} \[kvtide test_logs\.py:\d+\] the pool is back\n"
    assert re.fullmatch(line, stream.getvalue())


def test_what_somebody_set_up_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler of kvtide's logger or of the root is the operator's choice."""
    mine = logging.NullHandler()
    for name in ("kvtide", None):
        with fresh_loggers(monkeypatch) as stream:
            logging.getLogger(name).addHandler(mine)
            log_as_vllm_does()
            assert logging.getLogger(name).handlers == [mine]
            logging.getLogger("kvtide").error("to the operator's place")
        assert stream.getvalue() == ""
