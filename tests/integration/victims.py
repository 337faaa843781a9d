"""Work in a forked process that is killed at some moment."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable


def victim(work: Callable[[], object], kill_after_s: float | None) -> bool:
    """Run `work` in a forked process, kill it after that time; whether it came to its end."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:  # say what it was: nothing of a forked process reaches pytest
            traceback.print_exc()
            raise
        finally:
            os._exit(1)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0, "it failed by itself"
        return True
    return False


def timed(work: Callable[[], object]) -> float:
    began = time.monotonic()
    assert victim(work, None)
    return time.monotonic() - began
