"""What the daemon leaves out to stay small, and that it loses nothing by it: https is verified as ever."""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

CERTIFICATE = Path(__file__).parents[1] / "data" / "tls" / "localhost.pem"
"""Of localhost, signed by itself, with its key; of use for nothing else."""
DEADLINE_S = 60.0
CLIENT = """
import asyncio, os, sys
before = dict(os.environ)
import node_daemon.main
from node_daemon.client import Client
assert {**before, "OPENBLAS_NUM_THREADS": "1"} == dict(os.environ), "the environment has changed"

async def main():
    async with Client(sys.argv[1], "n1", b"s" * 32, 1, timeout_s=20) as client:
        answer = await client.post("/v1/report", b"", kind="text/plain")
        print(answer.taken, answer.reason, answer.detail)

asyncio.run(main())
"""
STORE = """
import node_daemon.main, aiohttp.connector
print(aiohttp.connector._SSL_CONTEXT_VERIFIED.cert_store_stats()["x509"])
"""
STEPS = """
import sys
import node_daemon.main
import numpy as np
from diagnosis.evidence.periods import POINT_DTYPE
from diagnosis.evidence.steps import Beat, Look

def learnt(signatures, gaps_us):
    beat = Beat()
    for at in range(1, 60):
        points = np.zeros(20, POINT_DTYPE)
        points["seq"] = np.arange(20 * at - 19, 20 * at + 1)
        points["signature"], points["gap_us"] = np.resize(signatures, 20), np.resize(gaps_us, 20)
        beat.observe(Look(at * 10**9, 20 * at, at * 10**9, points, 1, 20.0 * at * np.mean(gaps_us), 10**6))
        beat.learn()
    return beat.step.rounds

assert learnt([7], [100.0]) == 1
assert learnt([7], [900.0, 100.0, 100.0, 100.0, 100.0]) == 5
assert learnt([7, 8, 9, 7], [900.0, 100.0, 100.0, 100.0]) == 4
print([name for name in ("ma", "random", "fft", "testing") if f"numpy.{name}" in sys.modules])
"""


@asynccontextmanager
async def controller() -> AsyncIterator[str]:
    """Takes every report, over https; its URL."""

    async def taken(request: web.Request) -> web.Response:
        return web.Response(body=b"{}")

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATE)
    app = web.Application()
    app.router.add_post("/v1/report", taken)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        yield f"https://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def told(program: str, *arguments: str, **environment: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, *arguments),
        stdout=asyncio.subprocess.PIPE,
        env={**{name: value for name, value in os.environ.items() if not name.startswith("SSL_CERT")}, **environment},
    )
    out, _ = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode == 0
    return out.decode().strip()


async def test_a_controller_whose_certificate_the_system_knows_is_reached_by_https() -> None:
    async with controller() as url:
        assert (await told(CLIENT, url, SSL_CERT_FILE=str(CERTIFICATE))).startswith("True")


async def test_a_controller_with_another_certificate_is_not() -> None:
    async with controller() as url:
        answer = await told(CLIENT, url)
    assert answer.startswith("False connection")
    assert "CERTIFICATE_VERIFY_FAILED" in answer


async def test_aiohttp_has_no_certificates_of_its_own() -> None:
    assert await told(STORE, SSL_CERT_FILE=str(CERTIFICATE)) == "0"


async def test_following_steps_loads_no_further_part_of_numpy() -> None:
    assert await told(STEPS) == "[]"
