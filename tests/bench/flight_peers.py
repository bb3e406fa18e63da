"""Flight-recorder dumps of real jobs, judged by the engine and by PyTorch's own analyser (torch 2.13, `torchfrtrace`).

The dumps are four-rank gloo jobs with known faults, which are not part of a clone; without them there is nothing to
compare, and the report says so. PyTorch's analyser is run as a user would run it, once on the dumps as they are and
once on mended ones: torch 2.13 writes gloo's groups under an empty name, which stops the analyser, so each group is put
under the name that its entries use, with the ranks that recorded an operation of it. Its answer is read from what it
prints: the ranks called missing or culprit, of the first collective that it complains about.
"""

from __future__ import annotations

import importlib.util
import json
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from diagnosis.engine.verdict import judge
from diagnosis.evidence.gather import gather
from tests.bench.tables import table

DUMPS: Final = Path(__file__).parents[3] / "shared" / "samples" / "fr_dumps"
ANALYSER: Final = "torch.distributed.flight_recorder.fr_trace"
CLASSES: Final = {"not_entered": "H1", "mismatch_op": "H2", "mismatch_size": "H2", "slow_compute": "S1", "none": "none"}
DEADLINE_S: Final = 120.0
Dumps = dict[int, dict[str, Any]]


def report() -> str:
    """The comparison as a table, or why there is none."""
    if not DUMPS.is_dir():
        return "The dumps are not here, so nothing was compared.\n"
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed, so nothing was compared.\n"
    cases = json.loads((DUMPS / "truth.json").read_text())["cases"]
    rows = []
    right = [0, 0, 0]
    for name, truth in cases.items():
        guilty = set(truth["root_ranks"])
        dumps = {int(path.stem.split("_")[1]): pickle.loads(path.read_bytes()) for path in (DUMPS / name).glob("*.pkl")}
        verdict = _engine(DUMPS / name)
        answers = (verdict[1], _analyse(dumps), _analyse(_mended(dumps)))
        right = [count + (answer == guilty) for count, answer in zip(right, answers, strict=True)]
        words = [f"{_words(answers[0])} {verdict[0]}", *map(_words, answers[1:])]
        rows.append([name, f"{_words(guilty)} {CLASSES[truth['class']]}", *words])
    rows.append(["**exactly right**", str(len(cases)), *map(str, right)])
    return table(("job", "truth", "tocsin", "torchfrtrace", "torchfrtrace, dumps mended"), rows)


def _words(ranks: set[int] | None) -> str:
    return "fails" if ranks is None else ", ".join(map(str, sorted(ranks))) or "nobody"


def _engine(folder: Path) -> tuple[str, set[int]]:
    evidence = gather((path.name, [path.read_bytes()]) for path in sorted(folder.glob("*.json")))
    if evidence.incident is None:
        return "unread", set()
    verdict = judge(evidence.incident)
    return verdict.class_ or verdict.anomaly, {c.rank for c in verdict.culprits if c.rank is not None}


def _mended(dumps: Dumps) -> Dumps:
    groups: dict[tuple[str, str], set[int]] = {}
    for rank, dump in dumps.items():
        for entry in dump["entries"]:
            groups.setdefault(tuple(entry["process_group"]), set()).add(rank)
    config = {
        name: {"name": name, "desc": words, "ranks": str(sorted(ranks))} for (name, words), ranks in groups.items()
    }
    return {rank: dump | {"pg_config": config} for rank, dump in dumps.items()}


def _analyse(dumps: Mapping[int, dict[str, Any]]) -> set[int] | None:
    """Ranks that the analyser names first; None where it ends with an error."""
    with tempfile.TemporaryDirectory(prefix="tocsin-bench-") as folder:
        for rank, dump in dumps.items():
            (Path(folder) / f"rank_{rank}").write_bytes(pickle.dumps(dump))
        argv = [sys.executable, "-m", ANALYSER, folder, "-p", "rank_", "--allow-incomplete-ranks"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    if done.returncode:
        return None
    complaints = re.split(
        r"^(?=Not all ranks joining|Collective sequence number)", done.stdout + done.stderr, flags=re.M
    )[1:]
    for text in complaints[:1]:
        missing = re.search(r"missing ranks: \{([0-9, ]*)\}", text)
        named = missing[1].split(", ") if missing else re.findall(r"Culprit rank (\d+)", text)
        return {int(rank) for rank in named}
    return set()
