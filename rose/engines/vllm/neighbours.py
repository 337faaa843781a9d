"""What the rollout engines of a host do on the device, as the serving engine sees it."""

from __future__ import annotations

from pathlib import Path

from rose.boards import Activity, WatchedBoard
from rose.core.readings import ReplicaReading, Unknown


class Neighbours:
    """Time that opportunistic rollout engines had work on the device.

    Only tells steps that had the device to themselves from those that had not; no gate hangs on it.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._boards: dict[str, WatchedBoard[ReplicaReading]] = {}
        self._activities: tuple[Activity, ...] = ()

    def refresh(self, now_ns: int) -> None:
        """Look which there are.  For one thread, and not for every step: it opens files."""
        boards = {path.name: self._boards.get(path.name) for path in self._run_dir.glob("replica-*.board")}
        self._boards = {
            name: board or WatchedBoard(self._run_dir / name, ReplicaReading)
            for name, board in boards.items()
        }
        live = [board for board in self._boards.values() if not isinstance(board.read(now_ns, None), Unknown)]
        self._activities = tuple(board.activity for board in live if board.activity is not None)

    def busy_ns(self, now_ns: int) -> int:
        """Their time on the device, summed; differences mean something while the set of engines stays."""
        return sum(activity.busy_ns(now_ns) for activity in self._activities)
