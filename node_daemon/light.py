"""What makes the daemon's memory small and must come before the imports that it is about. `main` imports this first.

numpy's linear algebra would start a thread, with memory of its own, for every core of the node; none is needed here.
aiohttp reads all certificates of the system when it is imported, twice and for good, 2 MB; where the controller is
reached by https, `client` reads them, once.
"""

from __future__ import annotations

import importlib
import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"


def _import_without_certificates(name: str) -> None:
    told = {name: os.environ.get(name) for name in ("SSL_CERT_FILE", "SSL_CERT_DIR")}
    os.environ.update(dict.fromkeys(told, os.devnull))
    try:
        importlib.import_module(name)
    finally:
        for variable, value in told.items():
            if value is None:
                del os.environ[variable]
            else:
                os.environ[variable] = value


_import_without_certificates("aiohttp")
