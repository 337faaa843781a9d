"""Sharing a GPU: its readings, a rollout loop behind the real gate, MPS shares, and delta kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import GIB, CheckFailed, Figures, Peer, Skipped, environment, expect, need, need_cuda, quantile

NS_PER_MS = 1_000_000

# ---- readings ------------------------------------------------------------------------------------------


def readings(figures: Figures) -> None:
    """What NVML tells of the first GPU, through rosed's own reader."""
    need("pynvml", "nvidia-ml-py")
    nvml = need("rose_daemon.telemetry.nvml")
    reader = nvml.NvmlReader()
    reader.sweep()  # the first one also opens the library
    started = time.perf_counter()
    sweep = reader.sweep()
    figures["ms a sweep"] = 1e3 * (time.perf_counter() - started)
    expect(sweep.failure is None, f"NVML answers {sweep.failure}")
    expect(bool(sweep.devices), "NVML lists no GPU")
    device = sweep.devices[0]
    figures["GPUs"] = len(sweep.devices)
    figures["name"] = device.identity.name
    figures["memory"] = _told(device.memory, lambda m: f"{m.used / GIB:.1f} of {m.total / GIB:.1f} GiB")
    figures["utilisation"] = _told(device.utilisation, lambda percent: f"{percent} %")
    figures["processes"] = _told(device.processes, lambda found: f"{len(found)}")
    figures["clock reasons"] = _told(device.clock_reasons, lambda bits: f"{bits:#x}")
    figures["MIG"] = _told(device.mig, str)


def _told(value: Any, text: Any) -> str:
    """A reading, or the code in its place."""
    return f"NVML answers {value.code}" if type(value).__name__ == "Failed" else text(value)


# ---- the gate ---------------------------------------------------------------------------------------


class Work:
    """Matrix products of a fixed size, as a stand-in for a model's step."""

    def __init__(self, device: str, width: int) -> None:
        self.torch = need("torch")
        self.device = device
        dtype = self.torch.float32 if device == "cpu" else self.torch.bfloat16
        self.weights = self.torch.randn(width, width, device=device, dtype=dtype) / width**0.5
        self.width, self.dtype = width, dtype

    def step(self, tokens: int, layers: int) -> None:
        """One step; done on the device when this returns."""
        batch = self.torch.ones(tokens, self.width, device=self.device, dtype=self.dtype)
        for _ in range(layers):
            batch = batch @ self.weights
        if self.device != "cpu":
            self.torch.cuda.synchronize()


def serving_process(board_path: str, device: str, width: str, bursts: str) -> None:
    """A serving engine: bursts of decode steps and pauses of the same length, each told on its board."""
    boards, core = need("rose.boards"), need("rose.core.readings")
    writer = boards.BoardWriter(Path(board_path), core.SlackReading)
    work = Work(device, int(width))
    blank = core.SlackReading(*[0] * len(core.SlackReading._fields))
    steps = 0

    def publish(running: int, in_step: int) -> None:
        writer.publish(
            blank._replace(
                stamp_ns=time.monotonic_ns(), running=running, in_step=in_step, steps=steps,
                ttft_deadline_ns=core.NEVER, tpot_deadline_ns=core.NEVER,
            )
        )  # fmt: skip

    work.step(8, 20)
    publish(0, 0)
    print("ready", flush=True)
    while input() == "go":
        times = []
        for _ in range(int(bursts)):
            end_s = time.monotonic() + 0.25
            while time.monotonic() < end_s:
                publish(8, 1)
                started = time.perf_counter()
                work.step(8, 20)
                times.append(time.perf_counter() - started)
                steps += 1
            publish(0, 0)
            pause_end_s = time.monotonic() + 0.25
            while time.monotonic() < pause_end_s:
                time.sleep(0.02)
                publish(0, 0)
        print(quantile(times, 0.5), quantile(times, 0.99), len(times), flush=True)


class Rollout:
    """A rollout engine's loop: asks the gate before every step, unless it is to ignore it."""

    def __init__(self, board_path: Path, work: Work) -> None:
        boards, core, admission = need("rose.boards"), need("rose.core.readings"), need("rose.core.admission")
        self.board = boards.WatchedBoard(board_path, core.SlackReading)
        self.gate = admission.AdmissionGate(step_tokens_max=512)
        self.policy = core.GatePolicy(
            revision=1, mode=core.GateMode.STRICT, token_cap=512, kv_budget_blocks=0, rl_step=1,
            alive_until_ns=0, ttft_slo_ns=250 * NS_PER_MS, tpot_slo_ns=60 * NS_PER_MS,
            margin_ns=2 * NS_PER_MS,
        )  # fmt: skip
        self.work = work
        self.tokens = self.steps = self.wrong = 0
        self.asking_s: list[float] = []

    def ask(self) -> int:
        """Tokens that may run now."""
        started = time.perf_counter()
        now_ns = time.monotonic_ns()
        slack = self.board.read(now_ns, 500 * NS_PER_MS)
        policy = self.policy._replace(alive_until_ns=now_ns + 1000 * NS_PER_MS)
        tokens = self.gate.decide(slack, policy, now_ns).tokens
        self.asking_s.append(time.perf_counter() - started)
        self.wrong += bool(tokens and getattr(slack, "running", 1))
        return tokens

    def run(self, serving: Peer, *, gated: bool) -> list[float]:
        """Beside one round of serving: what that says of its steps (p50, p99 in s, number)."""
        self.tokens = self.steps = 0
        with _answer_of(serving, "go") as answered:
            while not answered():
                tokens = self.ask() if gated else 512
                if not tokens:
                    time.sleep(0.0005)
                    continue
                started_ns = time.monotonic_ns()
                self.work.step(tokens, 20)
                self.gate.observe_step(tokens, time.monotonic_ns() - started_ns)
                self.tokens, self.steps = self.tokens + tokens, self.steps + 1
        return [float(word) for word in serving.ask().split()]


@contextmanager
def _answer_of(peer: Peer, line: str) -> Iterator[Any]:
    """Send a line; whether its answer is there can be asked meanwhile."""
    select = need("select")
    answers = select.poll()  # unlike `select`, for any number of open files
    assert peer.process.stdin is not None
    peer.process.stdin.write(line + "\n")
    peer.process.stdin.flush()
    answers.register(peer.process.stdout, select.POLLIN)
    yield lambda: bool(answers.poll(0))


def gate(figures: Figures, device: str = "cuda", width: int = 8192, bursts: int = 8) -> None:
    """A rollout loop beside a serving loop: ungated, and behind the board and admission that engines use."""
    need("msgspec")
    torch = need_cuda() if device == "cuda" else need("torch")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        board = Path(folder) / "slack-serving.board"
        arguments = (str(board), device, str(width), str(bursts))
        with Peer("sharing_checks:serving_process", *arguments) as serving:
            serving.ask()
            rollout = Rollout(board, Work(device, width))
            rollout.work.step(512, 20)
            alone = [float(word) for word in serving.ask("go").split()]
            free = rollout.run(serving, gated=False)
            free_tokens = rollout.tokens
            gated = rollout.run(serving, gated=True)
    for name, row in (("alone", alone), ("ungated", free), ("gated", gated)):
        figures[f"serving step p50 ms, {name}"] = 1e3 * row[0]
        figures[f"serving step p99 ms, {name}"] = 1e3 * row[1]
    span_s = 0.5 * bursts
    figures["rollout tokens/s, ungated"] = free_tokens / span_s
    figures["rollout tokens/s, gated"] = rollout.tokens / span_s
    figures["asking p50 µs"] = 1e6 * quantile(rollout.asking_s, 0.5)
    figures["asking p99 µs"] = 1e6 * quantile(rollout.asking_s, 0.99)
    expect(rollout.wrong == 0, f"{rollout.wrong} steps were admitted beside serving requests")
    expect(rollout.steps > 0, "the gate never opened")


# ---- MPS ---------------------------------------------------------------------------------------------


def share_process(seconds: str) -> None:
    """Matrix products for a while; prints how many TFLOP/s they come to."""
    work = Work("cuda", 8192)
    work.step(4096, 2)
    started, steps = time.perf_counter(), 0
    while time.perf_counter() < started + float(seconds):
        work.step(4096, 10)
        steps += 1
    rate = steps * 10 * 2 * 4096 * 8192**2 / (time.perf_counter() - started)
    print(rate / 1e12, flush=True)


def mps(figures: Figures) -> None:
    """What a thread percentage leaves to a client, under a control daemon of our own in a private folder."""
    need_cuda()
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        raise Skipped("nvidia-cuda-mps-control is not installed")
    with tempfile.TemporaryDirectory(prefix="rose-mps-") as folder, _daemon(control, folder) as env:
        rates = {}
        for percent in (100, 50, 25):
            share = {**env, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent)}
            try:
                with Peer("sharing_checks:share_process", "2", env=share) as client:
                    rates[percent] = float(client.ask())
            except CheckFailed as reason:
                raise Skipped(f"MPS is not allowed here: {reason}") from None
            figures[f"TFLOP/s at {percent} %"] = rates[percent]
    expect(rates[25] < 0.6 * rates[100], "a quarter of the threads does not limit a client")


@contextmanager
def _daemon(control: str, folder: str) -> Iterator[dict[str, str]]:
    """A control daemon in the foreground, so that it ends with this check however that ends."""
    env = {**environment(), "CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    daemon = subprocess.Popen(
        [control, "-f"], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 10
        while not os.path.exists(f"{folder}/control"):  # noqa: PTH110 - it may vanish again
            if daemon.poll() is not None or time.monotonic() > deadline:
                raise Skipped("MPS is not allowed here: its daemon does not start")
            time.sleep(0.05)
        yield env
    finally:
        subprocess.run(
            [control], input="quit\n", text=True, env=env, check=False, capture_output=True, timeout=30
        )
        daemon.kill()
        daemon.wait()


# ---- delta ---------------------------------------------------------------------------------------------


def delta(figures: Figures) -> None:
    """Finding and packing changed weights on the device: the module brings its own check."""
    need_cuda()
    need("cupy", "cupy-cuda13x")
    figures.update(need("rose_kernels.delta.cuda").gpu_check())
