"""What mkdocs does beyond its own: pages link to the sources, which are no part of the site."""

from __future__ import annotations

import re
from typing import Any

_SOURCE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+((?:src|tests|benchmarks)/[^)]+)\)")


def on_page_markdown(markdown: str, *, config: Any, **_: object) -> str:  # noqa: ANN401
    """Lead links to sources to the repository, or leave their text alone where none is named."""
    repository = (config.repo_url or "").rstrip("/")
    target = rf"[\1]({repository}/blob/main/\2)" if repository else r"\1"
    return _SOURCE.sub(target, markdown)
