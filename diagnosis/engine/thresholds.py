"""When a difference counts. All in one place, all settable; times in seconds, shares in 0..1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Defaults are for production; a laboratory lowers the floors to seconds.

    Hang: nobody entered or left any round for `max(hang_floor_s, hang_factor * longest healthy round)`; before the
    first `warmup_rounds` of a job `startup_floor_s` stands in for the floor (imports, compilation, data set scans).
    Slow: over the newest `windows` windows, each of at least `window_rounds` rounds and `window_s` seconds, the median
    round time exceeds the baseline `slow_ratio` times and by `noise_factor` times the baseline's own spread, and no
    window falls back more than half of that: a single spike never fires, a noisy slow-down still does. An incident that
    is not watched (a bundle) counts as slow from `slow_job_min` above its own first samples.
    Blame: a rank or communicator must explain a share of the loss (`blame_share_min`, `transfer_share_min`), stand out
    by `rank_noise_factor` times the spread among its peers and have grown (`own_time_part_min` of a round,
    `transfer_growth_min` of its transfer); above `named_share_max` of all ranks nobody is named.
    """

    hang_floor_s: float = 120.0
    hang_factor: float = 3.0
    startup_floor_s: float = 900.0
    stale_after_s: float = 5.0
    warmup_rounds: int = 10
    baseline_windows: int = 8
    window_rounds: int = 10
    window_s: float = 1.0
    windows: int = 3
    slow_ratio: float = 1.25
    noise_factor: float = 4.0
    blame_share_min: float = 0.25
    clock_ratio_max: float = 0.9
    clock_explains_min: float = 0.3
    slow_job_min: float = 0.06
    rank_noise_factor: float = 6.0
    own_time_part_min: float = 0.02
    transfer_share_min: float = 0.2
    transfer_growth_min: float = 0.15
    named_share_max: float = 0.34

    @classmethod
    def told(cls, values: Mapping[str, float]) -> Thresholds:
        """Those of an incident (`Incident.thresholds`); a name that is not known here is passed over."""
        defaults = asdict(cls())
        return cls(**{name: type(default)(values.get(name, default)) for name, default in defaults.items()})
