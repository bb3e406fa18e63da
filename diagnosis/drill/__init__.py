"""tocsin's own cluster simulator: jobs with known faults, as bundles with truth (`docs/drill.md`)."""

from diagnosis.drill.drill import Drill, Limits, draw, files, kinds

__all__ = ["Drill", "Limits", "draw", "files", "kinds"]
