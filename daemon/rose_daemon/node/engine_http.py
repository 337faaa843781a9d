"""HTTP client of one engine: health, and the endpoints of the ROSE plugin."""

from __future__ import annotations

from typing import Any, TypeVar

import aiohttp
import msgspec

from rose.errors import RoseError
from rose.units import WeightVersion

ResponseT = TypeVar("ResponseT")


class EngineInfo(msgspec.Struct, frozen=True):
    """Answer of GET /rose/v1/engine."""

    role: str
    name: str
    weight_version: int
    model: str = ""
    vllm_version: str = ""
    rose_version: str = ""
    kv_total_blocks: int = 0
    block_tokens: int = 0


class UpdateAnswer(msgspec.Struct, frozen=True):
    """Answer of POST /rose/v1/weights/update; `ms` holds stage, pause, apply and total.

    Those of /stage and /apply hold their own.
    """

    version: int
    changed: int
    ms: dict[str, float]


class Held(msgspec.Struct, frozen=True):
    """Answer of POST /rose/v1/weights/undo and /rose/v1/weights/settle."""

    version_held: int


class Digests(msgspec.Struct, frozen=True):
    """Answer of GET /rose/v1/weights/digests: xxh3-128 (hex) by checkpoint name, from live parameters."""

    version: int
    digests: dict[str, str]


class _Aborted(msgspec.Struct, frozen=True):
    aborted: int


class _Refusal(msgspec.Struct, frozen=True):
    error: str = ""
    detail: str = ""
    version_held: int | None = None


class EngineUnreachable(RoseError):
    """The engine did not answer: no connection, a time-out, or a broken answer."""


class EngineRefused(RoseError):
    """The engine answered, and said no."""

    def __init__(self, status: int, error: str, detail: str, version_held: int | None) -> None:
        super().__init__(f"HTTP {status} {error}: {detail}" if detail else f"HTTP {status} {error}")
        self.status = status
        self.error = error
        self.version_held = version_held


class EngineClient:
    """Calls to one engine; every call has a deadline."""

    def __init__(self, session: aiohttp.ClientSession, url: str, token: str, *, timeout_s: float = 5) -> None:
        self.url = url
        self._session = session
        self._headers = {"Authorization": f"Bearer {token}"}
        self._timeout_s = timeout_s

    async def healthy(self) -> bool:
        """Whether /health answers 200.  Raises EngineUnreachable when nothing answers in time."""
        status, _ = await self._call("GET", "/health", self._timeout_s)
        return status == 200

    async def info(self) -> EngineInfo:
        """What runs there.  Raises EngineUnreachable, EngineRefused."""
        return await self._ask("GET", "/rose/v1/engine", EngineInfo, self._timeout_s)

    async def update(
        self,
        version: WeightVersion,
        base: WeightVersion,
        path: str,
        *,
        abort_in_flight: bool,
        timeout_s: float,
    ) -> UpdateAnswer:
        """Apply a staged version.  Raises EngineUnreachable, EngineRefused (nothing was written)."""
        body = {
            "version": version,
            "base_version": base,
            "path": path,
            "abort_in_flight": abort_in_flight,
        }
        return await self._ask("POST", "/rose/v1/weights/update", UpdateAnswer, timeout_s, body)

    async def stage(
        self, version: WeightVersion, base: WeightVersion, path: str, *, timeout_s: float
    ) -> UpdateAnswer:
        """Have it read and verify a staged version.  Raises EngineUnreachable, EngineRefused."""
        body = {"version": version, "base_version": base, "path": path}
        return await self._ask("POST", "/rose/v1/weights/stage", UpdateAnswer, timeout_s, body)

    async def apply(self, version: WeightVersion, *, abort_in_flight: bool, timeout_s: float) -> UpdateAnswer:
        """Have it write what it staged.  Raises EngineUnreachable, EngineRefused (nothing was written)."""
        body = {"version": version, "abort_in_flight": abort_in_flight}
        return await self._ask("POST", "/rose/v1/weights/apply", UpdateAnswer, timeout_s, body)

    async def undo(self, *, abort_in_flight: bool, timeout_s: float) -> WeightVersion:
        """Have it take back what it wrote, if anything; what it holds then.  Raises as `apply`."""
        body = {"abort_in_flight": abort_in_flight}
        return WeightVersion(
            (await self._ask("POST", "/rose/v1/weights/undo", Held, timeout_s, body)).version_held
        )

    async def settle(self, *, timeout_s: float) -> None:
        """Have it let go of the way back.  Raises EngineUnreachable, EngineRefused."""
        await self._ask("POST", "/rose/v1/weights/settle", Held, timeout_s, {})

    async def abort_all(self) -> int:
        """End every request in flight with what it has.  Raises EngineUnreachable, EngineRefused."""
        answer = await self._ask("POST", "/rose/v1/abort", _Aborted, self._timeout_s, {"all": True})
        return answer.aborted

    async def digests(self, timeout_s: float) -> Digests:
        """Digests of the live parameters.  Raises EngineUnreachable, EngineRefused."""
        return await self._ask("GET", "/rose/v1/weights/digests", Digests, timeout_s)

    async def _ask(
        self,
        method: str,
        route: str,
        kind: type[ResponseT],
        timeout_s: float,
        body: dict[str, Any] | None = None,
    ) -> ResponseT:
        status, data = await self._call(method, route, timeout_s, body)
        if status != 200:
            raise _refusal(status, data)
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, RecursionError) as error:
            raise EngineUnreachable(f"{self.url}{route}: unexpected answer: {error}") from None

    async def _call(
        self, method: str, route: str, timeout_s: float, body: dict[str, Any] | None = None
    ) -> tuple[int, bytes]:
        limit = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(
                method, self.url + route, json=body, headers=self._headers, timeout=limit
            ) as response:
                return response.status, await response.read()
        except TimeoutError:
            raise EngineUnreachable(f"{self.url}{route}: no answer in {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnreachable(f"{self.url}{route}: {error}") from None


def _refusal(status: int, data: bytes) -> EngineRefused:
    try:
        said = msgspec.json.decode(data, type=_Refusal)
    except (msgspec.DecodeError, RecursionError):
        said = _Refusal(detail=data[:200].decode(errors="replace"))
    return EngineRefused(status, said.error or "refused", said.detail, said.version_held)
