"""The outcome of a change of the layers, as it is reported to an operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tidegate.cluster.probe import Findings
from tidegate.layers.reconfiguration import State


@dataclass(frozen=True)
class Outcome:
    """`began_s` and `seconds` are the start and duration of the change itself. `moved` of the `subscriptions` changed
    their Matcher."""

    state: State
    began_s: float
    seconds: float
    moved: int
    subscriptions: int
    findings: Findings | None

    def to_dict(self) -> dict[str, Any]:
        """Returns the report of `tidegate scale` and `POST /v1/scale`. Without a probe, its fields are missing."""
        current = self.state.current
        told: dict[str, Any] = {
            "epoch": current.epoch,
            "slices": sorted(current.slices),
            "seconds": round(self.seconds, 2),
            "moved": self.moved,
            "moved_share": round(self.moved / self.subscriptions, 3) if self.subscriptions else 0.0,
        }
        return told | (_probe_fields(self.findings, self.began_s) if self.findings is not None else {})


def _probe_fields(findings: Findings, began_s: float) -> dict[str, Any]:
    times = list(zip(findings.sent_s, findings.delays_s, strict=True))
    before = [delay_s for sent_s, delay_s in times if sent_s + delay_s < began_s]
    during = [delay_s for sent_s, delay_s in times if sent_s + delay_s >= began_s]
    return {
        "probes": len(findings.sent_s),
        "longest_delay_ms": round(max(during, default=0.0) * 1000, 1),
        "longest_delay_before_ms": round(max(before, default=0.0) * 1000, 1),
        "lost": findings.lost,
        "doubled": findings.doubled,
        "disordered": findings.disordered,
    }
