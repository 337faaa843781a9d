"""Weight deltas onto live parameters: verified in the background, written during a short pause.

`LiveWeights` is a worker's view of its own parameters under the names and shapes of the checkpoint.
Everything works on bits: bf16 values are moved as 16-bit words and never converted.  No vLLM here: it works
on any torch module.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rose.errors import CorruptDelta, RoseError, WrongBase
from rose.weights.bits import Words, as_bits
from rose.weights.container import read_manifest, read_patches
from rose.weights.digests import digest, fingerprint
from rose.weights.manifest import Manifest, Parameter, tied_names
from rose.weights.patches import Patch, digest_patched

_WORD_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class LiveParameter(NamedTuple):
    """One checkpoint parameter inside the running model."""

    name: str
    dtype: str
    """A safetensors dtype name."""
    shape: tuple[int, ...]
    words: torch.Tensor
    """Flat integer view of the live memory."""

    def read(self) -> Words:
        """Its bits now, flat, in checkpoint order (on a CPU a view, from a GPU a copy)."""
        return as_bits(self.words).words


class _Write(NamedTuple):
    """What to write where; `indices` None writes all."""

    parameter: LiveParameter
    indices: torch.Tensor | None
    words: torch.Tensor

    def current(self) -> torch.Tensor:
        live = self.parameter.words
        return live.clone() if self.indices is None else live.index_select(0, self.indices)

    def do(self, words: torch.Tensor) -> None:
        if self.indices is None:
            self.parameter.words.copy_(words)
        else:
            self.parameter.words.index_copy_(0, self.indices, words)


class Staged(NamedTuple):
    """A verified version, ready to write."""

    version: int
    changed: int
    writes: tuple[_Write, ...]
    stage_ms: float


class ApplyFailed(RoseError):
    """A write into live parameters failed; what had been written was taken back."""


def live_parameters(model: torch.nn.Module) -> Iterator[LiveParameter]:
    """The model's parameters as its checkpoint names them (fused ones taken apart, padding left out).

    Raises RoseError where a layer does not compute from its plain parameter (packed or quantised).
    """
    modules = dict(model.named_modules())
    fused: dict[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    for name, parameter in model.named_parameters():
        data = parameter.data
        if not data.is_contiguous() or data.numel() == 0:
            raise RoseError(
                f"{name}: not held as plain values (shape {tuple(data.shape)}), so it cannot be updated live",
                "live weights need an unquantised model",
            )
        path, _, leaf = name.rpartition(".")
        owner, _, module_name = path.rpartition(".")
        module = modules[path]
        parts = fused.get(module_name)
        if parts is None:
            rows = getattr(module, "org_vocab_size", data.shape[0])
            yield _slice(name, data, 0, rows)
            continue
        first = 0
        for part, rows in zip(parts, module.output_sizes, strict=True):
            yield _slice(f"{owner}.{part}.{leaf}", data, first, rows)
            first += rows


def _slice(name: str, data: torch.Tensor, first: int, rows: int) -> LiveParameter:
    part = data[first : first + rows]
    shape = tuple(int(size) for size in part.shape)
    words = part.reshape(-1).view(_WORD_TYPES[data.element_size()])
    assert words.data_ptr() == part.data_ptr()
    assert words.numel() == math.prod(shape)
    return LiveParameter(name, as_bits(part[:0]).dtype, shape, words)


class LiveWeights:
    """The parameters of one worker, and the version they are.

    One version is staged at a time.  Only `apply` writes, and only while generation is paused, so the
    background thread may read the live parameters at any time.
    """

    def __init__(self, model: torch.nn.Module, *, tensor_parallel: int, version: int = 0) -> None:
        if tensor_parallel != 1:
            raise RoseError(
                f"live weights with tensor_parallel_size={tensor_parallel} are not supported yet",
                "start rollout engines with tensor_parallel_size=1",
            )
        self.parameters = {parameter.name: parameter for parameter in live_parameters(model)}
        self.version = version
        """Of what the parameters hold: at first what was loaded, 0 unless it is the host's copy."""
        self._fingerprint = fingerprint((p.name, p.dtype, p.shape) for p in self.parameters.values())
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="rose-stage")
        self._staging: Future[Staged] | None = None

    # ---- stage ----------------------------------------------------------------------------------

    def stage(self, directory: Path, version: int, base_version: int) -> Staged:
        """Read a version directory, and prove in scratch memory that it leads to the promised bytes.

        Nothing live changes.  Raises WrongBase if the version does not follow what the engine holds,
        CorruptDelta if its files do not verify or do not give the target digests.
        """
        started = time.monotonic()
        if base_version != self.version:
            raise WrongBase(f"version {version} is built on {base_version}, this engine holds {self.version}")
        manifest = read_manifest(directory)
        self._check_manifest(manifest, version, base_version)
        patches = {patch.name: patch for patch in read_patches(directory)}
        writes: list[_Write] = []
        for parameter in manifest.parameters:
            live = self.parameters.get(parameter.name)
            if live is None:
                continue  # tied to one that is there
            patch = patches.get(parameter.name)
            _verify(live.read(), parameter, patch)
            if patch is not None:
                writes.append(_prepare(live, patch))
        stage_ms = (time.monotonic() - started) * 1e3
        return Staged(version, sum(write.words.numel() for write in writes), tuple(writes), stage_ms)

    def _check_manifest(self, manifest: Manifest, version: int, base_version: int) -> None:
        if manifest.version != version:
            raise CorruptDelta(f"the files are version {manifest.version}, not {version}")
        if manifest.base_version not in {None, base_version}:
            raise WrongBase(
                f"the files of version {version} are built on {manifest.base_version}, not {base_version}"
            )
        tied = tied_names(manifest, self.parameters)
        form = ((p.name, p.dtype, p.shape) for p in manifest.parameters if p.name not in tied)
        if fingerprint(form) != self._fingerprint:
            raise WrongBase(f"version {version} belongs to a model of another form than this engine runs")

    # ---- apply ----------------------------------------------------------------------------------

    def apply(self, staged: Staged) -> None:
        """Write a staged version; generation must be paused.  Raises ApplyFailed, with nothing changed."""
        journal: list[tuple[_Write, torch.Tensor]] = []
        try:
            for write in staged.writes:
                journal.append((write, write.current()))
                write.do(write.words)
                if not torch.equal(write.current(), write.words):
                    raise ApplyFailed(f"{write.parameter.name}: reads back other bits than were written")
        except (ApplyFailed, RuntimeError, IndexError) as error:
            for write, before in reversed(journal):
                write.do(before)
            raise ApplyFailed(f"version {staged.version} was taken back: {error}") from error
        self.version = staged.version

    # ---- calls from the endpoints (through collective_rpc: plain values only) ---------------------

    def stage_in_background(self, path: str, version: int, base_version: int) -> dict[str, Any]:
        """Begin `stage` in a thread; refused while another version is staged or being staged."""
        if self._staging is not None:
            return {"state": "busy", "version_held": self.version}
        self._staging = self._executor.submit(self.stage, Path(path), version, base_version)
        return {"state": "staging"}

    def stage_state(self) -> dict[str, Any]:
        """`staging`, `staged`, or `refused` with the error (which frees the place for another version)."""
        if self._staging is None:
            return {"state": "idle"}
        if not self._staging.done():
            return {"state": "staging"}
        error = self._staging.exception()
        if error is not None:
            self._staging = None
            if not isinstance(error, WrongBase | CorruptDelta):
                raise error
            return {"state": "refused", **self._refusal(error)}
        staged = self._staging.result()
        return {"state": "staged", "changed": staged.changed, "stage_ms": staged.stage_ms}

    def apply_staged(self, version: int) -> dict[str, Any]:
        """`apply` what is staged, if it is `version`; says how long it took, or why not."""
        staged = self._staging.result() if self._staging is not None and self._staging.done() else None
        if staged is None or staged.version != version:
            return {"error": "not_staged", "version_held": self.version}
        self._staging = None
        started = time.monotonic()
        try:
            self.apply(staged)
        except ApplyFailed as error:
            return self._refusal(error)
        return {"version": version, "changed": staged.changed, "apply_ms": (time.monotonic() - started) * 1e3}

    def discard(self) -> dict[str, Any]:
        """Forget what is staged (a staging that still runs is waited for)."""
        if self._staging is not None:
            self._staging.exception()
            self._staging = None
        return {"version_held": self.version}

    def digests(self) -> dict[str, Any]:
        """xxh3-128 of every parameter's live bytes, and the version they are said to be."""
        return {
            "version": self.version,
            "digests": {name: digest(live.read()) for name, live in self.parameters.items()},
        }

    def close(self) -> None:
        """End the background thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _refusal(self, error: RoseError) -> dict[str, Any]:
        code = "apply_failed"
        if isinstance(error, WrongBase):
            code = "wrong_base"
        elif isinstance(error, CorruptDelta):
            code = "corrupt_delta"
        return {"error": code, "detail": error.what, "version_held": self.version}


def _verify(live: Words, parameter: Parameter, patch: Patch | None) -> None:
    """Prove that the live bytes are the base, and that the patch turns them into the target."""
    if patch is None:
        before, after = digest(live), parameter.target_digest
    else:
        before, after = digest_patched(live, patch.indices, patch.values)
    if parameter.base_digest not in (None, before):
        raise WrongBase(f"{parameter.name}: the live bytes are not those the delta was built on")
    if after != parameter.target_digest:
        raise CorruptDelta(f"{parameter.name}: the patch does not give the promised bytes")


def _prepare(live: LiveParameter, patch: Patch) -> _Write:
    """The patch as tensors beside the live parameter, so that the pause is left with the scatter alone."""
    signed = np.array(patch.values).view(f"<i{patch.values.itemsize}" if patch.values.itemsize > 1 else "u1")
    words = torch.from_numpy(signed).to(live.words.device)
    indices = None
    if patch.indices is not None:
        indices = torch.from_numpy(np.array(patch.indices)).to(live.words.device)
    return _Write(live, indices, words)
