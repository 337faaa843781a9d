"""Max-min fair shares of replicas between jobs, in whole replicas."""

from __future__ import annotations

from collections.abc import Mapping

from rose.units import JobId


def fair_shares(wanted: Mapping[JobId, int], supply: int) -> dict[JobId, int]:
    """How many of `supply` replicas each job may hold.

    Nobody gets more than it wants, and nobody's share can grow without making one grow smaller that is not
    larger (max-min fairness).  What cannot be divided goes to the jobs that come first in `wanted`.
    """
    shares = dict.fromkeys(wanted, 0)
    left = supply
    hungry = [job for job, most in wanted.items() if most > 0]
    while hungry and left > 0:
        each = max(1, left // len(hungry))
        for job in hungry[:left]:
            grant = min(each, wanted[job] - shares[job], left)
            shares[job] += grant
            left -= grant
        hungry = [job for job in hungry if shares[job] < wanted[job]]
    return shares
