"""What taking in reports costs the controller: verified, unpacked, checked, its request number on disk, acknowledged.

Client and server run in this one process over loopback, so the figure holds both ends: CPU time of the process for
each report, while 64 nodes send at a time as they do on a large cluster (request numbers that arrive together are
written together). `python -m tests.bench.bench_ingest [REPORTS]`
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

from controller.settings import Server
from diagnosis.contracts.report import GpuFacts, HardwareFacts, Report, encode
from tests.integration.controller_site import IngestSite
from tests.simjob import SimJob

REPORTS = 2000
SENDERS = 64
NODES, PERIOD_S = 12_500, 10.0
ROUNDS = 20
PATH = "/v1/report"


def bodies(ranks: int) -> dict[str, bytes]:
    """A report of each node on a job of its own: 20 new rounds of uneven length for each rank, and a GPU each."""
    noise = random.Random(1)
    made = {}
    for number in range(SENDERS):
        node = f"gpu{number:03d}"
        job = SimJob(ranks=ranks, per_node=ranks, job_id=number + 1)
        job.steps(ROUNDS, lambda rank, step: noise.uniform(30.0, 50.0))
        gpus = [GpuFacts(index=gpu, sm_clock_mhz=noise.randrange(1900, 1980)) for gpu in range(ranks)]
        report = Report(
            node=node,
            boot_id="boot",
            epoch=1,
            sample=1,
            mono_ms=0,
            wall_ms=0,
            window_ms=1000,
            jobs=[job.sample(job.nodes[0])],
            hardware=HardwareFacts("ok", gpus=gpus),
        )
        made[node] = encode(report)
    return made


async def cost_s(site: IngestSite, sent: dict[str, bytes], reports_each: int) -> float:
    """CPU seconds of both ends for one report."""

    async def send(node: str, body: bytes, count: int) -> None:
        for _ in range(count):
            status, refusal = await site.post(body, site.claim("POST", PATH, body, node=node))
            assert status == 200, refusal

    async def all_send(count: int) -> None:
        await asyncio.gather(*(send(node, body, count) for node, body in sent.items()))

    await all_send(1)
    began = time.process_time()
    await all_send(reports_each)
    return (time.process_time() - began) / (reports_each * len(sent))


async def main() -> None:
    reports = int(sys.argv[1]) if len(sys.argv) > 1 else REPORTS
    with tempfile.TemporaryDirectory(prefix="tocsin-bench-") as name:
        site = await IngestSite(Path(name), Server(), connections_max=2 * SENDERS).start()
        try:
            for ranks in (8, 64):
                sent = bodies(ranks)
                wire_kb = sum(map(len, sent.values())) / len(sent) / 1000
                each_s = await cost_s(site, sent, max(1, reports // SENDERS))
                share = 100 * each_s * NODES / PERIOD_S
                sys.stdout.write(
                    f"report of {ranks:2} ranks, {wire_kb:4.1f} kB on the wire: {each_s * 1000:6.3f} ms of a core;"
                    f" {NODES:,} nodes every {PERIOD_S:.0f} s: {share:4.0f} % of a core\n"
                )
        finally:
            await site.stop()


if __name__ == "__main__":
    asyncio.run(main())
