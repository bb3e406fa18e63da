"""The lab itself: a real cluster that comes up in seconds, runs jobs, and leaves nothing."""

from __future__ import annotations

from pathlib import Path

from tests.lab import network, sweep
from tests.lab.cluster import Lab


def test_a_batch_job_runs_over_four_nodes_with_two_gpus_each(lab: Lab, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\nsrun bash -c 'echo on $SLURMD_NODENAME with $CUDA_VISIBLE_DEVICES'\n")
    job = lab.submit(script, nodes=4, gpus_per_node=2)
    lab.wait_job(job, "COMPLETED")
    assert sorted(lab.output(job).splitlines()) == [f"on {node} with 0,1" for node in lab.node_names[:4]]


def test_a_stopped_lab_leaves_no_directory_namespace_or_frame() -> None:
    lab = Lab(nodes=2)
    lab.start()
    assert lab.directory.exists() and lab.frame_root.exists()
    lab.stop()
    assert not lab.directory.exists() and not lab.frame_root.exists()
    assert [name for name in network.namespaces() if lab.tag in name] == []
    assert lab.tag not in sweep.sweep()
