"""The switch-cost gate: whether a replica borrowed now would still pay in this step.

A borrowed replica is of no use until it is active and holds the job's weights.  Both take a while, which is
measured here from the grant of each lease to the moment at which the replica could take its first turn.  The
gain is what is left of the step's rollout, expected from the steps before.
"""

from __future__ import annotations

from rose.units import ReplicaId

_SMOOTHING = 0.3
"""Weight of the newest observation in the moving averages."""


class SwitchCost:
    """Of one job."""

    def __init__(self, prior_ns: int, gain_min: float) -> None:
        """`prior_ns` is the cost until one was measured; a gain must be `gain_min` times the cost."""
        self._gain_min = gain_min
        self.cost_ns = float(prior_ns)
        """From a grant to a replica that takes turns, moving average."""
        self.rollout_ns: float | None = None
        """From the begin to the end of a step's rollout, moving average; None before the first end."""
        self._measured = False
        self._began_ns: int | None = None
        self._pending: dict[ReplicaId, int] = {}

    def granted(self, replica: ReplicaId, now_ns: int) -> None:
        """A borrowed replica was leased to the job."""
        self._pending[replica] = now_ns

    def usable(self, replica: ReplicaId, now_ns: int) -> None:
        """It can take turns; only the first time after its grant counts."""
        if (since_ns := self._pending.pop(replica, None)) is not None:
            took_ns = now_ns - since_ns
            self.cost_ns = _moved(self.cost_ns, took_ns) if self._measured else float(took_ns)
            self._measured = True

    def ended(self, replica: ReplicaId) -> None:
        """Its lease ended."""
        self._pending.pop(replica, None)

    def step_began(self, now_ns: int) -> None:
        """Rollouts of a step begin."""
        self._began_ns = now_ns

    def step_ended(self, now_ns: int) -> None:
        """They are over."""
        if self._began_ns is not None:
            took_ns = now_ns - self._began_ns
            self.rollout_ns = float(took_ns) if self.rollout_ns is None else _moved(self.rollout_ns, took_ns)
            self._began_ns = None

    def pays(self, now_ns: int, turns_wait: bool) -> bool:
        """Whether to borrow one more replica now.

        Between steps it always does: there is time to get ready.  In a step that lasts longer than expected
        only a queue tells that there is work for another replica.
        """
        if self._began_ns is None or self.rollout_ns is None:
            return True
        left_ns = self._began_ns + self.rollout_ns - now_ns
        return turns_wait if left_ns <= 0 else left_ns >= self._gain_min * self.cost_ns


def _moved(average: float, value: float) -> float:
    return average + _SMOOTHING * (value - average)
