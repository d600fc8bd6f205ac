"""Store URLs: ``scheme://location?parameter=value``, read with every fault named at once."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

from kvtide.errors import ConfigError
from kvtide.units import parse_size

_MOST_BYTES = 1 << 60
_MOST_MILLISECONDS = 24 * 3600 * 1000


def nearest(name: str, known: Iterable[str]) -> str:
    """Return what a message about an unknown ``name`` adds: what was meant, or all that is."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(names)}" if names else "it takes none"


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A store URL taken apart: ``scheme://host/path?parameters``; host and path may be empty."""

    text: str
    scheme: str
    host: str
    path: str
    parameters: Mapping[str, str]

    @property
    def identity(self) -> str:
        """What one process shares a handle by: scheme, host, resolved path, and some parameters.

        A tenant has keys of its own, and who gives a segment of memory is not who gives none. The
        others say how a store is used, not which one it is.
        """
        path = os.path.realpath(self.path) if self.path and not self.host else self.path
        telling = [name for name in ("tenant", "segment") if name in self.parameters]
        parameters = "&".join(f"{name}={self.parameters[name]}" for name in telling)
        return f"{self.scheme}://{self.host}{path}" + (f"?{parameters}" if parameters else "")

    @classmethod
    def parse(cls, text: str) -> StoreUrl:
        """Take ``text`` apart.

        Raises:
            ConfigError: it is no URL, a parameter is given twice or has no value, or there is a
                fragment.
        """
        faults = []
        scheme, separator, _ = text.partition("://")
        if not separator and text.split(":/", maxsplit=1)[0].isalnum() and ":/" in text:
            raise ConfigError(f"the store URL {text!r} has one slash only: write scheme://...")
        if not separator or not scheme:
            raise ConfigError(
                f"the store URL {text!r} has no scheme: write for instance"
                " local:///dev/shm/kvtide?size=20GiB"
            )
        try:
            parts = urlsplit(text)
        except ValueError as error:
            raise ConfigError(f"the store URL {text!r} is not a URL: {error}") from error
        if parts.fragment:
            faults.append(f"the store URL {text!r} has a fragment (#{parts.fragment}): remove it")
        parameters: dict[str, str] = {}
        for name, value in parse_qsl(parts.query, keep_blank_values=True):
            if name in parameters:
                faults.append(f"the parameter {name!r} of the store URL is given twice")
            if not value:
                faults.append(f"the parameter {name!r} of the store URL has no value")
            parameters[name] = value
        path = unquote(parts.path)
        if not _can_be_path(path):
            faults.append(f"the store URL {text!r} has a character that no path can have")
        if faults:
            raise ConfigError(faults)
        return cls(text, scheme.lower(), parts.netloc, path, parameters)


class UrlReader:
    """Reads the parts of one URL, collecting faults; :meth:`finish` raises them all together."""

    def __init__(self, url: StoreUrl, known: Iterable[str]) -> None:
        self._url = url
        self.faults: list[str] = []
        known = tuple(known)
        for name in url.parameters:
            if name not in known:
                self.faults.append(
                    f"{url.scheme}:// stores have no parameter {name!r}: {nearest(name, known)}"
                )

    def size(self, name: str, *, may_be_zero: bool = False) -> int | None:
        """Return the parameter ``name`` in bytes, None where it is absent or faulty."""
        text = self._url.parameters.get(name)
        if not text:
            return None
        try:
            num_bytes = parse_size(text)
        except ValueError as error:
            self.faults.append(f"the parameter {name!r}: {error}")
            return None
        if num_bytes == 0 and not may_be_zero:
            self.faults.append(f"the parameter {name!r}: {text!r} must be positive")
            return None
        if num_bytes > _MOST_BYTES:
            self.faults.append(f"the parameter {name!r} is more than any machine has")
            return None
        return num_bytes

    def milliseconds(self, name: str) -> int | None:
        """Return the parameter ``name`` as a positive whole number, None where absent or faulty."""
        text = self._url.parameters.get(name)
        if text is None:
            return None
        # Python refuses to read thousands of digits as a number.
        is_short = len(text) <= 2 * len(str(_MOST_MILLISECONDS))
        if not text.isdecimal() or (is_short and int(text) == 0):
            self.faults.append(f"the parameter {name!r}: {text!r} is not a number of milliseconds")
            return None
        if not is_short or int(text) > _MOST_MILLISECONDS:
            self.faults.append(
                f"the parameter {name!r}: {_MOST_MILLISECONDS} milliseconds (a day) are the most"
            )
            return None
        return int(text)

    def fault(self, message: str) -> None:
        """Add a fault that the caller found."""
        self.faults.append(message)

    def finish(self) -> None:
        """Do nothing if the URL was read without a fault.

        Raises:
            ConfigError: every fault found.
        """
        if self.faults:
            raise ConfigError(self.faults)


def _can_be_path(path: str) -> bool:
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False
