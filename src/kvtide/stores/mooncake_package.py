"""The Mooncake package: its module, its programs, and the system libraries that both need.

The wheels are linked against the libraries of RDMA, also where only TCP is used, and do not bring
them along. They are taken from the system, or from a folder of this environment into which
``scripts/install-mooncake-libraries`` unpacked them.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from kvtide.errors import StoreOpenError

LIBRARIES = ("libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1", "librdmacm.so.1")
"""What the wheels need of the system, each after what it depends on itself."""
FOLDER = Path("lib") / "kvtide-mooncake"
"""Where in an environment the libraries lie that were unpacked for it."""
_REMEDY = (
    "install them (Debian, Ubuntu: apt-get install libibverbs1 librdmacm1 libnl-3-200"
    " libnl-route-3-200; Fedora, RHEL: dnf install libibverbs librdmacm libnl3), or, without root,"
    " run scripts/install-mooncake-libraries of kvtide's repository for this Python"
)


def mooncake_module() -> ModuleType:
    """Return ``mooncake.store``.

    Raises:
        StoreOpenError: the package or a system library is missing; the message says what to
            install.
    """
    _require_package()
    _require_libraries()
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise StoreOpenError(f"the mooncake package cannot be loaded: {error}") from error


def mooncake_program(name: str) -> str:
    """Return the path of one of the package's programs, such as ``mooncake_master``.

    Raises:
        StoreOpenError: as :func:`mooncake_module`.
    """
    folder = _require_package()
    _require_libraries()
    path = folder / name
    if not path.is_file():
        raise StoreOpenError(f"the installed mooncake package has no program {name!r}: upgrade it")
    if not os.access(path, os.X_OK):  # pip loses the permission of what is not a script
        path.chmod(path.stat().st_mode | 0o111)
    return str(path)


def program_environment() -> dict[str, str]:
    """Return this process's environment, with which the package's programs find their libraries."""
    return _with_folder(os.environ, Path(sys.prefix) / FOLDER)


def _with_folder(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    found = dict(environment)
    if folder.is_dir():
        known = found.get("LD_LIBRARY_PATH")
        found["LD_LIBRARY_PATH"] = f"{folder}:{known}" if known else str(folder)
    return found


def _require_package() -> Path:
    spec = find_spec("mooncake")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not places:
        raise StoreOpenError(
            "mooncake:// stores need the Mooncake package: pip install"
            " mooncake-transfer-engine-non-cuda (or, on a machine with CUDA,"
            " mooncake-transfer-engine)"
        )
    return Path(places[0])


def _require_libraries() -> None:
    missing = [name for name in LIBRARIES if not load_library(name)]
    if missing:
        raise StoreOpenError(
            f"the Mooncake package needs the system libraries {', '.join(missing)}: {_REMEDY}"
        )


def load_library(name: str) -> bool:
    """Load a library for good, so that whatever is linked against it finds it loaded."""
    for path in (name, str(Path(sys.prefix) / FOLDER / name)):
        try:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return True
    return False
