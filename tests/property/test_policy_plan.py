"""A case in a hostile world: whoever dies, meddles or fails, no safety rule is broken and every case ends.

Everything happens in memory on a clock of its own, so a thousand bad days take seconds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from remediation.backends.fake import FakeSlurm
from remediation.policy.case import Act, Case, Finished
from remediation.policy.facts import Facts
from remediation.policy.guards import held_by_us
from remediation.policy.reason import is_exactly_ours, is_ours, with_action
from remediation.policy.rules import Policy
from remediation.policy.world import World
from tests.casework import Casework, Died

BAD = ("gpu002", "gpu003")
REASON = "tocsin:ab12cd:gpu_clock_throttle:GPU5:drain job 42 slow, 97% sure"
FOREIGN = "bad DIMM, do not touch"
ON_NODES = frozenset({"drain", "set_down", "resume", "undown"})
ONCE = frozenset({"drain", "requeue", "set_exclude", "release", "set_down", "undown"})
STEPS_MAX = 1500
POLICY = Policy.model_validate(
    {
        "mode": "act",
        "budget": {"nodes_held_max": 2, "nodes_held_pct_max": 25.0},
        "slow": {"checkpoint_signal": "USR1", "checkpoint_grace_s": 5},
        "completing": {"down_after_s": 5},
        "limits": {
            "settle_s": 2,
            "tries_max": 10,
            "retry_after_s": 0.5,
            "completing_s_max": 60,
            "start_s_max": 150,
            "stepping_s_max": 60,
            "old_ranks_s_max": 60,
        },
    }
)


class WatchedSlurm(FakeSlurm):
    """Checks each act against the rules at the moment it comes. `acting`: whether the policy allows any act now."""

    acting = True
    expected = frozenset({REASON})

    def _may_fail(self, method: str, target: str) -> None:
        if method != "snapshot":
            assert self.acting, f"{method} {target} while paused"
        if method in ON_NODES:
            reason = self.nodes[target].reason
            assert is_ours(reason) or not (reason or self.nodes[target].held), f"{method} {target}: {reason}"
            if method in ("resume", "undown"):
                assert any(is_exactly_ours(reason, ours) for ours in self.expected), f"{method} {target}: {reason}"
        if method == "requeue":
            job = self.jobs[int(target)].view
            assert (job.state, job.restarts) == ("RUNNING", 0), f"requeue of a job that is {job.state}"
        super()._may_fail(method, target)


class Day:
    """One case, one Slurm, and the people and accidents around it."""

    def __init__(self, *, drain: bool, bad: tuple[str, ...] = BAD[:1], frozen: bool = False) -> None:
        self.slurm = WatchedSlurm()
        job = self.slurm.submit("gpu001", *bad, exclude=("gpu008",))
        if frozen:
            self.slurm.frozen.update(bad)
        reason = REASON if drain else with_action(REASON, "requeue")
        self.slurm.expected = frozenset({reason, with_action(reason, "down")})
        anomaly, to_drain = ("slow", bad) if drain else ("hang", ())
        now = self.slurm.now
        case = Case("ab12cd", 42, job.submit_time, 0, anomaly, to_drain, bad, True, reason, drain, now)
        self.work = Casework(case, POLICY, self.slurm, self.look, lambda: self.slurm.now, self.rest)
        self.gone: bool | None = True
        self.foreign: set[str] = set()

    def look(self, world: World) -> Facts:
        """Ranks that advance wherever a later attempt runs."""
        job = world.jobs.get(42)
        stepping = job is not None and job.state == "RUNNING" and job.restarts != 0
        return Facts(stepping_elsewhere=stepping, old_ranks_gone=dict.fromkeys(world.nodes, self.gone))

    async def rest(self) -> None:
        self.slurm.advance(1.0)

    def state(self) -> object:
        """What is left in the end, without times.

        A node that is drained need not be excluded as well: a job that Slurm starts while nobody lives to exclude it
        (at once, when the last old node is set DOWN) cannot get it either.
        """
        nodes = {view.name: (view.flags, view.reason) for view in self.slurm.nodes.values()}
        job = self.slurm.jobs[42].view
        excluded = {name for name in job.exclude if "DRAIN" not in self.slurm.nodes[name].flags}
        return nodes, (job.state, job.nodes, excluded, job.restarts, job.held)

    async def until_end(self, events: dict[int, list[tuple[str, str]]]) -> Finished:
        """Live through the day; `events` by the number of the step before which they happen."""
        for number in range(STEPS_MAX):
            for kind, word in events.get(number, ()):
                self.happen(kind, word)
            try:
                step = await self.work.step()
            except Died:
                continue
            held = held_by_us(World(self.slurm.now, self.slurm.nodes))
            assert len(held) <= 2, held
            for name in self.foreign:
                assert self.slurm.nodes[name].reason == FOREIGN
            if isinstance(step, Finished):
                return step
            if not isinstance(step, Act):
                await self.rest()
        raise AssertionError("the case does not end")

    def happen(self, kind: str, word: str) -> None:
        """One thing that people, nodes or the network do."""
        slurm = self.slurm
        match kind:
            case "pause":
                self.work.policy = POLICY.model_copy(update={"paused": True})
                slurm.acting = False
            case "observe":
                self.work.policy = POLICY.model_copy(update={"mode": "observe"})
                slurm.acting = False
            case "go on":
                self.work.policy = POLICY
                slurm.acting = True
            case "foreign drain":
                slurm.change_node(word, add="DRAIN", reason=FOREIGN)
                self.foreign.add(word)
            case "undrain":
                slurm.change_node(word, add="IDLE", remove="DRAIN DOWN", reason="")
                self.foreign.discard(word)
            case "freeze":
                slurm.frozen.add(word)
            case "thaw":
                slurm.frozen.discard(word)
            case "cancel":
                slurm.cancel(42)
            case "hold":
                slurm.change_job(42, lambda job: replace(job, held=job.state == "PENDING", reason="JobHeldUser"))
            case "requeue by the user":
                slurm.requeue_by_user(42)
            case "fail":
                slurm.failures[word] = slurm.failures.get(word, 0) + 1
            case "ranks stay":
                self.gone = None
            case "the controller dies":
                self.work.die_after |= {len(self.work.acts)}


events = st.tuples(
    st.integers(0, 14),
    st.one_of(
        st.tuples(st.sampled_from(("pause", "observe", "cancel", "hold", "requeue by the user")), st.just("")),
        st.tuples(st.sampled_from(("ranks stay", "the controller dies", "the controller dies")), st.just("")),
        st.tuples(
            st.sampled_from(("foreign drain", "undrain", "freeze", "thaw")), st.sampled_from(("gpu001", *BAD, "gpu004"))
        ),
        st.tuples(st.just("fail"), st.sampled_from(sorted(ONCE | {"signal", "start_in"}))),
    ),
)


@settings(max_examples=300, deadline=None)
@given(st.booleans(), st.integers(1, 2), st.booleans(), st.lists(events, max_size=8))
def test_no_rule_is_broken_on_any_day_and_every_case_ends(
    drain: bool, count: int, frozen: bool, drawn: list[tuple[int, tuple[str, str]]]
) -> None:
    day = Day(drain=drain, bad=BAD[:count], frozen=frozen)
    planned: dict[int, list[tuple[str, str]]] = {40: [("go on", "")]}
    for number, event in drawn:
        planned.setdefault(number, []).append(event)
    end = asyncio.run(day.until_end(planned))
    job = day.slurm.jobs[42].view
    assert end.outcome in ("resolved", "partly", "abandoned", "withdrawn") and end.text
    if end.outcome == "resolved":
        assert job.state == "RUNNING" and not set(job.nodes) & set(day.work.case.avoid) and not job.held
        assert "gpu008" in job.exclude
    quiet = not any(kind in ("hold", "undrain", "freeze", "ranks stay", "foreign drain") for _, (kind, _) in drawn)
    if job.held and quiet:
        assert "scontrol release 42" in end.text, end


@settings(max_examples=200, deadline=None)
@given(
    st.booleans(),
    st.integers(1, 2),
    st.booleans(),
    st.frozensets(st.integers(0, 14), max_size=4),
    st.frozensets(st.integers(0, 14), max_size=4),
)
def test_a_controller_that_dies_anywhere_comes_to_the_same_end_with_each_act_once(
    drain: bool, count: int, frozen: bool, before: frozenset[int], after: frozenset[int]
) -> None:
    calm = Day(drain=drain, bad=BAD[:count], frozen=frozen)
    end = asyncio.run(calm.until_end({}))
    day = Day(drain=drain, bad=BAD[:count], frozen=frozen)
    day.work.die_before, day.work.die_after = before, after
    assert asyncio.run(day.until_end({})) == end
    assert end.outcome == "resolved"
    assert day.state() == calm.state()
    counts = Counter(call for call in day.slurm.calls if call[0] in ONCE)
    assert all(count == 1 for count in counts.values()), counts
    missing = {call for call in calm.slurm.calls if call[0] in ONCE} - set(counts)
    assert missing <= ({("set_exclude", "42")} if drain else set())
