"""Memory: the arena beside plain allocation, two processes with one ledger, and copies from the host."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import GIB, CheckFailed, Figures, Peer, expect, need, need_cuda, quantile, seconds

ARENA_BYTES = 8 * GIB
EXCHANGE_BYTES = 10 * GIB
EXCHANGE_ROUNDS = 3
SLACK_BYTES = GIB // 2
"""What contexts and rounding may add to memory that is measured."""
COPY_BYTES = 16_000_000_000
COPY_S_MAX = 5.0
COPY_CHUNK_BYTES = 64 << 20


def _free_bytes(torch: Any) -> int:
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


def _fitting(torch: Any, wanted: int, figures: Figures) -> int:
    """As much of `wanted` as fits beside what the GPU holds already, in whole GiB."""
    size = min(wanted, _free_bytes(torch) * 4 // 5 // GIB * GIB)
    expect(size >= GIB, "less than 1 GiB of GPU memory is free")
    figures["GiB"] = size / GIB
    return size


# ---- arena ------------------------------------------------------------------------------------------


def arena(figures: Figures) -> None:
    """Time to give and take a GiB, in pages of two sizes and by plain allocation; contents are looked at."""
    torch = need_cuda()
    need("cuda.bindings.driver", "cuda-bindings")
    torch.cuda.init()
    size = _fitting(torch, ARENA_BYTES, figures)
    for name, page_bytes in (("2 MiB", None), ("32 MiB", 32 << 20)):
        _give_and_take(torch, size, page_bytes, name, figures)
    _plain_allocation(torch, size, figures)


def _give_and_take(torch: Any, size: int, page_bytes: int | None, name: str, figures: Figures) -> None:
    cuda = need("rose_kernels.arena.cuda")
    gib = size / GIB
    with cuda.CudaArena(size, page_bytes=page_bytes) as arena:
        pages, half = size // arena.page_bytes, size // arena.page_bytes // 2
        empty = _free_bytes(torch)
        figures[f"map ms/GiB, pages of {name}"] = 1e3 * seconds(arena.ensure, 0, pages) / gib
        view = torch.as_tensor(arena, device="cuda")
        expect(view.data_ptr() == arena.address, "torch copied the arena instead of looking at it")
        view.fill_(7)
        full = _free_bytes(torch)
        expect(empty - full >= 0.98 * size, f"{(empty - full) / GIB:.2f} GiB went, of {gib:.2f} mapped")
        figures[f"unmap ms/GiB, pages of {name}"] = (
            1e3 * seconds(arena.release, half, pages - half) / (gib / 2)
        )
        back = _free_bytes(torch) - full
        expect(back >= 0.98 * size / 2, f"{back / GIB:.2f} GiB came back, of {gib / 2:.2f} unmapped")
        arena.ensure(0, pages)
        kept = view[: half * arena.page_bytes]
        expect(int(kept.min()) == int(kept.max()) == 7, "pages that stayed lost their contents")
        figures[f"copy GB/s within the arena, {name}"] = _copy_rate(torch, view)
        del view, kept
    expect(_free_bytes(torch) >= empty - SLACK_BYTES, "closing did not give the memory back")


def _copy_rate(torch: Any, view: Any) -> float:
    """Bytes read and written a second by a copy of one half onto the other."""
    half = view.numel() // 2
    source, target = view[:half], view[half : 2 * half]
    target.copy_(source)
    torch.cuda.synchronize()
    return 2 * half / 1e9 / seconds(lambda: (target.copy_(source), torch.cuda.synchronize()))


def _plain_allocation(torch: Any, size: int, figures: Figures) -> None:
    torch.cuda.empty_cache()
    started = time.perf_counter()
    plain = torch.empty(size, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    figures["torch.empty ms/GiB"] = 1e3 * (time.perf_counter() - started) / (size / GIB)
    plain.fill_(1)
    figures["copy GB/s, plain"] = _copy_rate(torch, plain)
    del plain
    figures["torch.cuda.empty_cache ms/GiB"] = 1e3 * seconds(torch.cuda.empty_cache) / (size / GIB)


# ---- exchange ---------------------------------------------------------------------------------------


class Holder:
    """One of two processes that want the same memory, of a GPU or ("cpu") of the host."""

    def __init__(self, path: Path, role: int, pages: int, device: str) -> None:
        ledger = need("rose_kernels.arena.ledger", "the C library (install gcc and setuptools)")
        self.ledger = ledger.Ledger(path)
        self.account = self.ledger.join(ledger.Role(role), pages)
        self.pages = pages
        size = pages * self.ledger.page_bytes
        if device == "cpu":
            self.arena = need("rose_kernels.arena.host").HostArena(size)
            self._write = lambda: ctypes.memset(self.arena.address, role, size)
        else:
            self._torch = need_cuda()
            self._torch.cuda.init()
            self.arena = need("rose_kernels.arena.cuda").CudaArena(size, page_bytes=self.ledger.page_bytes)
            self._write = self._write_on_device

    def _write_on_device(self) -> None:
        self._torch.as_tensor(self.arena, device="cuda").fill_(int(self.account.role))
        self._torch.cuda.synchronize()

    def take(self) -> bool:
        """Acquire, map, and write to all of it; False if the ledger has not enough."""
        if not self.account.acquire(self.pages):
            return False
        self.arena.ensure(0, self.pages)
        self._write()
        return True

    def give(self) -> None:
        """Unmap, let the device finish, release."""
        self.arena.release(0, self.pages)
        self.account.release(self.pages)


def holder_process(path: str, pages: str, device: str) -> None:
    """The rollout side: does what it is told on standard input."""
    holder = Holder(Path(path), 2, int(pages), device)
    print("ready", flush=True)
    while True:
        match input():
            case "take":
                print("taken" if holder.take() else "refused", flush=True)
            case "give":
                holder.give()
                print("given", flush=True)
            case "resident":
                print(holder.arena.resident_bytes(), flush=True)


def exchange(figures: Figures, device: str = "cuda", size: int = EXCHANGE_BYTES) -> None:
    """All of the memory goes from one process to the other and back; one is killed with it in the end."""
    ledger_module = need("rose_kernels.arena.ledger", "the C library (install gcc and setuptools)")
    page_bytes = mmap.PAGESIZE
    if device != "cpu":
        torch = need_cuda()
        need("cuda.bindings.driver", "cuda-bindings")
        torch.cuda.init()
        size, page_bytes = _fitting(torch, size, figures), ledger_module.PAGE_BYTES
    with tempfile.TemporaryDirectory() as folder:
        path, pages = Path(folder) / "device.ledger", size // page_bytes
        ledger_module.Ledger.create(path, pages, page_bytes)
        serving = Holder(path, 1, pages, device)
        try:
            with Peer("memory_checks:holder_process", str(path), str(pages), device) as rollout:
                rollout.ask()
                empty = 0 if device == "cpu" else _free_bytes(torch)

                def used() -> int:
                    """As the device says; on the CPU as the kernel says of both arenas."""
                    if device != "cpu":
                        return empty - _free_bytes(torch)
                    return int(serving.arena.resident_bytes()) + int(rollout.ask("resident"))

                _exchange(serving, rollout, size, used, figures)
        finally:
            serving.arena.close()


def _exchange(serving: Holder, rollout: Peer, size: int, used: Callable[[], int], figures: Figures) -> None:
    to_rollout, to_serving, most = [], [], 0
    expect(serving.take(), "nothing was free to begin with")
    for _ in range(EXCHANGE_ROUNDS):
        expect(rollout.ask("take") == "refused", "both hold the same pages")
        started = time.perf_counter()
        serving.give()
        expect(rollout.ask("take") == "taken", "what was given back could not be taken")
        to_rollout.append(time.perf_counter() - started)
        most = max(most, used())
        expect(not serving.take(), "both hold the same pages")
        started = time.perf_counter()
        rollout.ask("give")
        expect(serving.take(), "what was given back could not be taken")
        to_serving.append(time.perf_counter() - started)
        most = max(most, used())
    expect(most <= size + SLACK_BYTES, f"{most / GIB:.2f} GiB were in use at once")
    figures["GiB in use at the most"] = most / GIB
    figures["s to hand over, to rollout"] = quantile(to_rollout, 0.5)
    figures["s to hand over, to serving"] = quantile(to_serving, 0.5)
    serving.give()
    expect(rollout.ask("take") == "taken", "what was given back could not be taken")
    started = time.perf_counter()
    rollout.process.send_signal(signal.SIGKILL)
    rollout.process.wait()
    reclaimed = serving.ledger.reclaim()
    expect(sum(line.held_pages for line in reclaimed) == serving.pages, "the dead process's pages are gone")
    expect(serving.take(), "what a dead process held could not be taken")
    figures["s to take from a killed process"] = time.perf_counter() - started
    serving.give()


# ---- contention --------------------------------------------------------------------------------------


def contention(figures: Figures, processes: int = 8, duration_s: float = 3.0) -> None:
    """Many processes at one ledger: how long an acquisition takes then, and nothing given out twice."""
    ledger_module = need("rose_kernels.arena.ledger", "the C library (install gcc and setuptools)")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "contended.ledger"
        ledger = ledger_module.Ledger.create(path, 1000)
        queue = context.Queue()
        workers = [context.Process(target=_contend, args=(path, duration_s, queue)) for _ in range(processes)]
        for worker in workers:
            worker.start()
        rows = [queue.get(timeout=30 + duration_s) for _ in workers]
        for worker in workers:
            worker.join()
        ledger.reclaim()
        expect(ledger.used_pages == 0, "pages were lost")
    figures["processes"] = processes
    figures["operations/s"] = sum(row["operations"] for row in rows) / duration_s
    figures["refused share"] = sum(row["refused"] for row in rows) / sum(row["operations"] for row in rows)
    figures["acquire+release p50 µs"] = quantile([row["p50"] for row in rows], 0.5) * 1e6
    figures["acquire+release p99 µs, worst process"] = max(row["p99"] for row in rows) * 1e6
    expect(not [row for row in rows if row["over"]], "more was given out than there is")


def _contend(path: Path, duration_s: float, queue: Any) -> None:
    ledger_module = need("rose_kernels.arena.ledger")
    ledger = ledger_module.Ledger(path)
    account = ledger.join(ledger_module.Role.ROLLOUT, ledger.capacity_pages)
    end = time.monotonic() + duration_s
    times, refused, over, operations = [], 0, 0, 0
    while time.monotonic() < end:
        started = time.perf_counter()
        taken = account.acquire(300)
        if taken:
            over += ledger.used_pages > ledger.capacity_pages
            account.release(taken)
        times.append(time.perf_counter() - started)
        refused += not taken
        operations += 1
    account.leave()
    queue.put(
        {"operations": operations, "refused": refused, "over": over, "p50": quantile(times, 0.5),
         "p99": quantile(times, 0.99)}
    )  # fmt: skip


# ---- host to device -----------------------------------------------------------------------------------


def host_copy(figures: Figures) -> None:
    """16 GB of weights onto the device: from pinned memory, and from a mapped file as rosed keeps them."""
    torch = need_cuda()
    room = min(_available_bytes() // 3, _free_bytes(torch) * 4 // 5, COPY_BYTES)
    size = room // COPY_CHUNK_BYTES * COPY_CHUNK_BYTES
    expect(size > GIB, "less than 1 GiB is free, on the host or on the GPU")
    figures["GB"] = size / 1e9
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    limit_s = COPY_S_MAX * size / COPY_BYTES
    took: dict[str, float] = {}
    file = os.memfd_create("rose-gpu-check")  # in memory, and gone with this process whatever ends it
    os.ftruncate(file, size)
    store = torch.frombuffer(memoryview(mmap.mmap(file, size)), dtype=torch.uint8)
    _fill(torch, store)
    took["file through pinned buffers"] = seconds(_through_buffers, torch, store, device)
    _compare(torch, store, device)
    _from_registered(torch, store, device, took)
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    pinned.fill_(5)
    device.zero_()
    torch.cuda.synchronize()
    took["pinned"] = seconds(lambda: (device.copy_(pinned, non_blocking=True), torch.cuda.synchronize()))
    expect(int(device.min()) == int(device.max()) == 5, "the copy differs")
    for name, duration in took.items():
        figures[f"s, {name}"] = duration
        figures[f"GB/s, {name}"] = size / 1e9 / duration
    best = min(duration for name, duration in took.items() if name.startswith("file"))
    expect(took["pinned"] < limit_s, f"from pinned memory it takes {took['pinned']:.1f} s, not {limit_s:.1f}")
    expect(best < limit_s, f"from a mapped file it takes {best:.1f} s, not {limit_s:.1f}")


def _available_bytes() -> int:
    """Memory that processes of this host can still get."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise CheckFailed("/proc/meminfo has no MemAvailable")


def _fill(torch: Any, store: Any) -> None:
    """Every page of the file gets memory and a content of its own."""
    pattern = torch.arange(COPY_CHUNK_BYTES // 8, dtype=torch.int64).view(torch.uint8)
    for number, chunk in enumerate(store.split(COPY_CHUNK_BYTES)):
        chunk.copy_(pattern[: chunk.numel()])
        chunk[0] = number % 251


def _compare(torch: Any, store: Any, device: Any) -> None:
    for at in range(0, store.numel(), COPY_CHUNK_BYTES):
        both = (each[at : at + 4096].cpu() for each in (store, device))
        expect(torch.equal(*both), f"the copy differs at byte {at}")
    expect(torch.equal(store[-4096:], device[-4096:].cpu()), "the copy differs at its end")


def _through_buffers(torch: Any, store: Any, device: Any) -> None:
    """Two pinned buffers: one is filled from the file while the other travels."""
    buffers = [torch.empty(COPY_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    events = [torch.cuda.Event() for _ in buffers]
    for number, at in enumerate(range(0, store.numel(), COPY_CHUNK_BYTES)):
        buffer, event = buffers[number % 2], events[number % 2]
        event.synchronize()
        chunk = store[at : at + COPY_CHUNK_BYTES]
        buffer[: chunk.numel()].copy_(chunk)
        device[at : at + chunk.numel()].copy_(buffer[: chunk.numel()], non_blocking=True)
        event.record()
    torch.cuda.synchronize()


def _from_registered(torch: Any, store: Any, device: Any, took: dict[str, float]) -> None:
    """The driver pins the file's pages where they are; not every system lets it."""
    runtime = torch.cuda.cudart()
    device.zero_()
    torch.cuda.synchronize()
    started = time.perf_counter()
    if int(runtime.cudaHostRegister(store.data_ptr(), store.numel(), 0)) != 0:
        return
    registered = time.perf_counter()
    try:
        device.copy_(store, non_blocking=True)
        torch.cuda.synchronize()
        took["file registered, once registered"] = time.perf_counter() - registered
        took["registering it"] = registered - started
        _compare(torch, store, device)
    finally:
        if int(runtime.cudaHostUnregister(store.data_ptr())) != 0:
            raise CheckFailed("the driver does not let go of the file")
