"""Which weights are served now, as far as an operator can tell: the deployment part of a key."""

from __future__ import annotations

import secrets
from pathlib import Path

from kvtide.errors import ConfigError

_FILE_MARK = "@"
_MAX_NAME_BYTES = 256


class Deployment:
    """Names the weights now served; :meth:`change` is called when they may have changed.

    ``weights_version`` is a name, or ``@/path`` of a file that holds one. Only a file can say
    what the *new* weights are called, so it is read again at each change, and replicas that were
    given the same version go on sharing. Otherwise the new name is random: a counter would let
    two replicas with different weights meet.

    Raises:
        ConfigError: the file cannot be read or is empty.
    """

    def __init__(self, weights_version: str) -> None:
        self._file = Path(weights_version[1:]) if weights_version.startswith(_FILE_MARK) else None
        self.name = self._read() if self._file is not None else weights_version

    def change(self) -> None:
        """Take another name; where the file fails, a random one, which shares nothing."""
        try:
            self.name = self._read() if self._file is not None else secrets.token_hex(16)
        except ConfigError:
            self.name = secrets.token_hex(16)

    def _read(self) -> str:
        assert self._file is not None
        try:
            name = self._file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"weights_version names the file {self._file}, which cannot be read ({error}): "
                "write the version of the served weights into it"
            ) from error
        if not name or len(name) > _MAX_NAME_BYTES:
            raise ConfigError(
                f"weights_version names the file {self._file}, which must hold a name of 1 to "
                f"{_MAX_NAME_BYTES} characters"
            )
        return name
