"""kvtide's log lines among vLLM's: to the same places, at the same level, and told apart."""

from __future__ import annotations

import copy
import logging

_FORMAT = "%(levelname)s %(asctime)s [kvtide %(filename)s:%(lineno)d] %(message)s"
_DATE_FORMAT = "%m-%d %H:%M:%S"


def log_as_vllm_does() -> None:
    """Give kvtide's logger what vLLM's has, unless somebody has set up logging for it.

    vLLM sets up its own logger alone: others' lines would come bare, without time and level.
    """
    ours, theirs = logging.getLogger("kvtide"), logging.getLogger("vllm")
    if ours.handlers or logging.getLogger().handlers:
        return
    for handler in theirs.handlers:
        mine = copy.copy(handler)
        mine.setFormatter(logging.Formatter(_FORMAT, _DATE_FORMAT))
        ours.addHandler(mine)
    if ours.level == logging.NOTSET:
        ours.setLevel(theirs.getEffectiveLevel())
