"""An environment server in the manner of ROCK's sandboxes: directories and shells over HTTP.

The endpoints and messages are those that ROCK's client uses (/apis/envs/sandbox/v1), so an agent written for
one works with the other.  What is missing here is the sandbox itself: commands run as the user that started
the server, in a directory that is deleted afterwards.  Run it in a container, or use ROCK.

python examples/sandbox_server.py --port 9100
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import tempfile
import uuid
from pathlib import Path
from typing import Any

from aiohttp import web

PREFIX = "/apis/envs/sandbox/v1"
OUTPUT_BYTES_MAX = 1 << 20
SANDBOXES_MAX = 256


class Refused(Exception):
    """The request cannot be carried out; its text says why."""


class Shell:
    """A bash that keeps its state between commands."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._busy = asyncio.Lock()

    @classmethod
    async def start(cls, directory: Path) -> Shell:
        """In that directory, and in a process group of its own."""
        process = await asyncio.create_subprocess_exec(
            "bash", "--norc", cwd=directory, start_new_session=True, limit=OUTPUT_BYTES_MAX,
            env={"PATH": os.environ.get("PATH", os.defpath), "HOME": str(directory), "LANG": "C.UTF-8"},
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        return cls(process)

    async def run(self, command: str, timeout_s: float) -> dict[str, Any]:
        """Output and exit code; a command that takes too long ends the shell."""
        async with self._busy:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            mark = f"--{uuid.uuid4().hex}"
            # Standard input is the shell's own: a command that read it would swallow what comes next.
            script = f"{{ {command}\n}} </dev/null\nprintf '\\n%s %s\\n' {mark} $?\n"
            try:
                async with asyncio.timeout(timeout_s):
                    self._process.stdin.write(script.encode())
                    await self._process.stdin.drain()
                    output = await self._process.stdout.readuntil(f"\n{mark} ".encode())
                    code = int(await self._process.stdout.readline())
            except TimeoutError:
                await self.stop()
                return _observation("", None, f"still running after {timeout_s:g} s")
            except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError) as error:
                await self.stop()
                return _observation("", None, f"the shell ended, or printed too much: {error}")
        text = output[: -len(mark) - 2].decode("utf-8", errors="replace")
        return _observation(text, code, "" if code == 0 else f"exit code {code}")

    async def stop(self) -> None:
        """End the shell and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()


def _observation(output: str, code: int | None, failure: str) -> dict[str, Any]:
    return {"session_type": "bash", "output": output, "exit_code": code, "failure_reason": failure}


class Sandbox:
    """A directory and its shells."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="sandbox-")
        self.directory = Path(self._folder.name)
        self.shells: dict[str, Shell] = {}

    async def stop(self) -> None:
        """Nothing is left of it."""
        for shell in self.shells.values():
            await shell.stop()
        self._folder.cleanup()


class Server:
    """Handlers."""

    def __init__(self) -> None:
        self._sandboxes: dict[str, Sandbox] = {}

    def app(self) -> web.Application:
        """The application."""
        app = web.Application(client_max_size=1 << 20, middlewares=[_envelope])
        calls = {
            "start_async": self.start, "create_session": self.create_session, "run_in_session": self.run,
            "execute": self.execute, "stop": self.stop,
        }  # fmt: skip
        app.add_routes([web.post(f"{PREFIX}/{name}", handler) for name, handler in calls.items()])
        app.add_routes([web.get(f"{PREFIX}/get_status", self.status)])
        app.on_cleanup.append(self._stop_all)
        return app

    async def start(self, http: web.Request) -> dict[str, Any]:
        """A new sandbox; the image and sizes that ROCK's client sends mean nothing here."""
        if len(self._sandboxes) >= SANDBOXES_MAX:
            raise Refused(f"{SANDBOXES_MAX} sandboxes are running already")
        name = uuid.uuid4().hex
        self._sandboxes[name] = Sandbox()
        return {"sandbox_id": name, "host_name": "localhost", "host_ip": "127.0.0.1"}

    async def status(self, http: web.Request) -> dict[str, Any]:
        """Whether it lives."""
        name = http.query.get("sandbox_id", "")
        return {
            "sandbox_id": name,
            "is_alive": name in self._sandboxes,
            "status": {},
            "host_name": "localhost",
        }

    async def create_session(self, http: web.Request) -> dict[str, Any]:
        """A shell with a name."""
        body = await http.json()
        sandbox, name = self._find(body), str(body.get("session") or "default")
        if name in sandbox.shells:
            raise Refused(f"session {name!r} exists")
        sandbox.shells[name] = await Shell.start(sandbox.directory)
        return {"output": "", "session_type": "bash"}

    async def run(self, http: web.Request) -> dict[str, Any]:
        """Run a command in a shell."""
        body = await http.json()
        shell = self._find(body).shells.get(str(body.get("session") or "default"))
        if shell is None:
            raise Refused(f"no session {body.get('session')!r}")
        return await shell.run(str(body["command"]), float(body.get("timeout") or 60))

    async def execute(self, http: web.Request) -> dict[str, Any]:
        """Run a command in a shell of its own."""
        body = await http.json()
        shell = await Shell.start(self._find(body).directory)
        command = body["command"]
        seen = await shell.run(command if isinstance(command, str) else " ".join(command), 60)
        await shell.stop()
        return {"stdout": seen["output"], "stderr": seen["failure_reason"], "exit_code": seen["exit_code"]}

    async def stop(self, http: web.Request) -> dict[str, Any]:
        """Stop a sandbox; one that is gone already is no error."""
        sandbox = self._sandboxes.pop(str((await http.json()).get("sandbox_id")), None)
        if sandbox is not None:
            await sandbox.stop()
        return {}

    def _find(self, body: dict[str, Any]) -> Sandbox:
        sandbox = self._sandboxes.get(str(body.get("sandbox_id")))
        if sandbox is None:
            raise Refused(f"no sandbox {body.get('sandbox_id')!r}")
        return sandbox

    async def _stop_all(self, _: web.Application) -> None:
        for sandbox in self._sandboxes.values():
            await sandbox.stop()


@web.middleware
async def _envelope(http: web.Request, handler: Any) -> web.StreamResponse:
    """Results and refusals as ROCK's client reads them."""
    try:
        return web.json_response(
            {"status": "Success", "message": "", "error": None, "result": await handler(http)}
        )
    except (Refused, ValueError, KeyError) as error:
        return web.json_response(
            {"status": "Failed", "message": str(error), "error": str(error), "result": None}
        )


def main() -> None:
    """Serve on loopback."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=9100)
    options = parser.parse_args()
    web.run_app(Server().app(), host="127.0.0.1", port=options.port, print=lambda *_: None)


if __name__ == "__main__":
    main()
