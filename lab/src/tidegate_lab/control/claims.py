"""Claims about active control. A grid of simulated or measured runs decides whether each is held.

Most claims and their limits were written down before any run. Four kinds were added when the first figures were known:
claims about the IDC, about fairness, about clients without hints, and about the agreement of simulation and
measurement. The means decide claims of a ratio or a difference.
"""

from __future__ import annotations

from tidegate_lab.control.grid import Grid
from tidegate_lab.control.policies import (
    AST,
    CODEL_RBT,
    CODEL_SUM,
    CONFLATION,
    FIXED,
    FULL_DESIGN,
    LIGHT,
    NONE,
    RBT,
    RBT_PRINTED,
    RIGOROUS,
    RIGOROUS_MEAN,
    SPREAD,
    Policy,
)
from tidegate_lab.report import Chapter


def claim_at_most(
    chapter: Chapter, grid: Grid, scenario: str, what: str, ours: Policy, theirs: Policy, measure: str, at_most: float
) -> None:
    ratio = grid.over(scenario, ours, theirs, measure)
    text = f"{scenario}: {what} of {ours.name} against {theirs.name}"
    chapter.claim(f"{text} (at most {at_most:g} times)", ratio.value <= at_most, ratio.write(3))


def claim_steps(chapter: Chapter, grid: Grid, scenario: str) -> None:
    """Claims the effect of each step of the papers under overload."""
    for policy in (FIXED, AST):
        losses = grid.over(scenario, policy, NONE, "notification_loss")
        stale = grid.over(scenario, policy, NONE, "stale_share")
        chapter.claim(
            f"{scenario}: compared with none, {policy.name} loses at least 3 times as many notifications, and is at "
            "least 1.5 times as stale",
            losses.value >= 3 and stale.value >= 1.5,
            f"loss {losses.write()}, staleness {stale.write()}",
        )
    near = grid.over(scenario, RBT_PRINTED, AST, "stale_share")
    chapter.claim(
        f"{scenario}: the staleness of RBT as printed is within 10 % of AST's", abs(near.value - 1) <= 0.1, near.write()
    )
    quicker = grid.over(scenario, AST, RBT, "response_p50_s")
    fresher = grid.excess(scenario, RBT, AST, "stale_share")
    chapter.claim(
        f"{scenario}: repaired RBT (mediate) divides the median response time by 3 or more, and lowers staleness by at "
        "least 10 points",
        quicker.value >= 3 and fresher <= -0.10,
        f"{quicker.write(1)}, {points(fresher)}",
    )
    missed = {policy.name: grid.mean(scenario, policy, "missed_share") for policy in (LIGHT, RBT)}
    chapter.claim(
        f"{scenario}: light misses more than half of lasting congestion, mediate at most 1 %",
        missed[LIGHT.name] > 0.5 and missed[RBT.name] <= 0.01,
        ", ".join(f"{name}: {share:.1%}" for name, share in missed.items()),
    )


def claim_conflation(chapter: Chapter, grid: Grid, scenario: str) -> None:
    stale = grid.over(scenario, CONFLATION, AST, "stale_share")
    age = grid.over(scenario, CONFLATION, AST, "age_s")
    chapter.claim(
        f"{scenario}: conflation alone halves AST's staleness and divides its age by 5",
        stale.value <= 0.5 and age.value <= 0.2,
        f"{stale.write()}, {age.write()}",
    )


def claim_patience(chapter: Chapter, grid: Grid, scenario: str, served_per_s: float) -> None:
    """Claims how much of the broker's work is wasted on clients that give up."""
    wasted = {policy: grid.mean(scenario, policy, "wasted_share") for policy in (AST, RBT)}
    useful = grid.mean(scenario, RBT, "goodput_per_s") / served_per_s
    chapter.claim(
        f"{scenario}: AST wastes over 90 % of the served requests, repaired RBT under 10 %",
        wasted[AST] > 0.9 and wasted[RBT] < 0.1,
        f"{wasted[AST]:.1%} and {wasted[RBT]:.1%}",
    )
    chapter.claim(
        f"{scenario}: repaired RBT uses at least 45 % of the capacity for useful queries",
        useful >= 0.45,
        f"{useful:.0%}",
    )


def claim_burst(chapter: Chapter, grid: Grid, scenario: str) -> None:
    """Claims the effects of the policies in a slide-show."""
    costs = grid.excess(scenario, RBT, AST, "stale_share")
    spared = grid.over(scenario, RBT, AST, "bystander_p99_s")
    chapter.claim(
        f"{scenario}: in a burst, RBT is 0 to 3 points staler than AST, and lowers the p99 of bystanders by at least "
        "20 %",
        0 <= costs <= 0.03 and spared.value <= 0.8,
        f"{points(costs)}, {spared.write()}",
    )
    claim_spread(chapter, grid, scenario)
    summed, alone = (grid.over(scenario, policy, RBT, "stale_share") for policy in (CODEL_SUM, CODEL_RBT))
    chapter.claim(
        f"{scenario}: CoDel makes a burst 3 times staler, unless clients wait only for the backoff after a refusal",
        summed.value >= 3 and alone.value < 3,
        f"{summed.write()}; {alone.write()} with the backoff alone",
    )


def claim_spread(chapter: Chapter, grid: Grid, scenario: str) -> None:
    response = grid.over(scenario, SPREAD, AST, "response_p99_s")
    bystander = grid.over(scenario, SPREAD, AST, "bystander_p99_s")
    stale = grid.excess(scenario, SPREAD, AST, "stale_share")
    chapter.claim(
        f"{scenario}: the spread lowers the p99 of responses and of bystanders by at least 70 %, and adds less than a "
        "point of staleness",
        response.value <= 0.3 and bystander.value <= 0.3 and stale < 0.01,
        f"{response.write()}, {bystander.write()}, {points(stale)}",
    )


def claim_fresher(chapter: Chapter, grid: Grid, scenario: str) -> None:
    stale = grid.over(scenario, FULL_DESIGN, AST, "stale_share")
    chapter.claim(f"{scenario}: the full design is fresher than AST", stale.value < 1, stale.write())


def claim_no_staler(chapter: Chapter, grid: Grid, scenarios: list[str]) -> None:
    worse = {name: grid.excess(name, FULL_DESIGN, AST, "stale_share") for name in scenarios}
    chapter.claim(
        f"{', '.join(scenarios)}: the full design is at most half a point staler than AST",
        max(worse.values()) <= 0.005,
        ", ".join(f"{name}: {points(more)}" for name, more in worse.items()),
    )


def claim_alarms(chapter: Chapter, grid: Grid, scenario: str) -> None:
    alarms = {policy: grid.mean(scenario, policy, "false_alarm_share") for policy in (RIGOROUS_MEAN, RIGOROUS)}
    chapter.claim(
        f"{scenario}: rigorous by the mean has 25 % to 45 % false alarms, by the request's own processing time at most "
        "1 %",
        0.25 <= alarms[RIGOROUS_MEAN] <= 0.45 and alarms[RIGOROUS] <= 0.01,
        f"{alarms[RIGOROUS_MEAN]:.1%} and {alarms[RIGOROUS]:.1%}",
    )


def claim_random_loss(chapter: Chapter, grid: Grid, scenario: str) -> None:
    ratio = grid.over(scenario, AST, NONE, "stale_share")
    both = [f"{grid.mean(scenario, policy, 'stale_share'):.1%}" for policy in (NONE, AST)]
    chapter.claim(
        f"{scenario}: the staleness of AST is at most 0.6 times that of none",
        ratio.value <= 0.6,
        f"{both[0]} to {both[1]}: {ratio.write()}",
    )


def points(share: float) -> str:
    return f"{100 * share:+.1f} points"
