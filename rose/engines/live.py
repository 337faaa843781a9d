"""Weight deltas onto live parameters: verified in the background, written during a short pause.

`LiveWeights` is a worker's view of its own parameters under the names and shapes of the checkpoint.
Everything works on bits: bf16 values are moved as 16-bit words and never converted.  No vLLM here: it works
on any torch module.

Under tensor parallelism every rank writes its own part.  Digests are of whole parameters, so one rank, in
turn, gets the parts of the others and proves the parameter for all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from rose_kernels import delta

from rose.engines.parameters import LiveParameter, live_parameters
from rose.engines.ranks import OneRank, Ranks
from rose.errors import CorruptDelta, RoseError, WrongBase
from rose.weights import boxes
from rose.weights.bits import Words, as_bits, word_dtype
from rose.weights.boxes import Box
from rose.weights.container import read_manifest, read_patches
from rose.weights.digests import digest, fingerprint
from rose.weights.manifest import Manifest, Parameter, tied_names
from rose.weights.patches import Patch, digest_patched

RANKS_DIFFER = "ranks_differ"
"""In place of a digest: ranks hold different bytes of the same part."""


class _Write(NamedTuple):
    """What to write where; `indices` None writes all."""

    parameter: LiveParameter
    indices: torch.Tensor | None
    words: torch.Tensor

    def do(self, words: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Write `words`; answers what was there before, and whether all reads back as written."""
        if self.indices is not None and words.device.type == "cpu":
            # One pass over the memory where torch takes three: waiting for it is most of the pause.
            live, values = as_bits(self.parameter.words).words, as_bits(words).words
            before, same = delta.kernels().exchange(live, self.indices.numpy(), values)
            return torch.from_numpy(before.view(words.numpy().dtype)), same
        held = self._read()
        if self.indices is None:
            self.parameter.words.copy_(words)
        else:
            self.parameter.words.index_copy_(0, self.indices, words)
        return held, torch.equal(self._read(), words)

    def _read(self) -> torch.Tensor:
        live = self.parameter.words
        return live.clone() if self.indices is None else live.index_select(0, self.indices)


class Staged(NamedTuple):
    """A verified version, ready to write."""

    version: int
    changed: int
    writes: tuple[_Write, ...]
    stage_ms: float


class _Written(NamedTuple):
    """A version that was written and may still be taken back."""

    version_before: int
    journal: tuple[tuple[_Write, torch.Tensor], ...]


class ApplyFailed(RoseError):
    """A write into live parameters failed; what had been written was taken back."""


class WeightsMixed(RoseError):
    """A write into live parameters failed and could not be taken back: nobody knows what they hold."""


class LiveWeights:
    """The parameters of one worker, and the version they are.

    One version is staged at a time.  Only `apply` and `take_back` write, and only while generation is paused,
    so the background thread may read the live parameters at any time.  With several `ranks`, all of them make
    the same calls in the same order.
    """

    def __init__(self, model: torch.nn.Module, *, ranks: Ranks | None = None, version: int = 0) -> None:
        self._ranks = ranks or OneRank()
        found = live_parameters(model, rank=self._ranks.index, ranks=self._ranks.size)
        self.parameters = {parameter.name: parameter for parameter in found}
        held = {name: parameter.box for name, parameter in self.parameters.items()}
        told = self._ranks.agree(msgspec.json.encode(held))
        self._held = [msgspec.json.decode(each, type=dict[str, Box]) for each in told]
        self.version = version
        """Of what the parameters hold: at first what was loaded, 0 unless it is the host's copy."""
        self._fingerprint = fingerprint((p.name, p.dtype, p.shape) for p in self.parameters.values())
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="rose-stage")
        self._staging: Future[Staged] | None = None
        self._written: _Written | None = None
        self._mixed = ""

    # ---- stage ----------------------------------------------------------------------------------

    def stage(self, directory: Path, version: int, base_version: int) -> Staged:
        """Read a version directory, and prove in scratch memory that it leads to the promised bytes.

        Nothing live changes.  Raises WrongBase if the version does not follow what the engine holds,
        CorruptDelta if its files do not verify or do not give the target digests, on whatever rank.
        """
        started = time.monotonic()
        manifest, patches, fault = self._read(directory, version, base_version)
        self._raise_agreed(fault)
        assert manifest is not None
        self._raise_agreed(self._verify(manifest, patches))
        mine = [(self.parameters[name], patch) for name, patch in patches.items() if name in self.parameters]
        writes = tuple(_prepare(live, patch) for live, patch in mine)
        changed = sum(patch.values.size for _, patch in mine)
        return Staged(version, changed, writes, (time.monotonic() - started) * 1e3)

    def _read(
        self, directory: Path, version: int, base_version: int
    ) -> tuple[Manifest | None, dict[str, Patch], RoseError | None]:
        try:
            if self._mixed:
                raise WrongBase(self._mixed)
            if base_version != self.version:
                raise WrongBase(
                    f"version {version} is built on {base_version}, this engine holds {self.version}"
                )
            manifest = read_manifest(directory)
            self._check_manifest(manifest, version, base_version)
            return manifest, {patch.name: patch for patch in read_patches(directory)}, None
        except (WrongBase, CorruptDelta) as error:
            return None, {}, error

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

    def _verify(self, manifest: Manifest, patches: Mapping[str, Patch]) -> RoseError | None:
        """The first fault of those parameters that this rank proves.

        A fault ends nothing: the other ranks go on to send what they hold.
        """
        fault: RoseError | None = None
        promised = {parameter.name: parameter for parameter in manifest.parameters}
        for name, words in self._proven_here():
            try:
                if words is None:
                    raise WrongBase(f"{name}: ranks that hold the same part of it differ")
                _verify(words, promised[name], patches.get(name))
            except (WrongBase, CorruptDelta) as error:
                fault = fault or error
        return fault

    def _proven_here(self) -> Iterator[tuple[str, Words | None]]:
        """Whole parameters, live, of which this rank computes digests; collective.

        What every rank holds whole each proves by itself; what is cut is dealt out in turn.  None where ranks
        that hold the same part differ.
        """
        turn = 0
        for live in self.parameters.values():
            held = [each[live.name] for each in self._held]
            if all(box == boxes.whole(live.shape) for box in held):
                yield live.name, live.read()
                continue
            owner = turn = (turn + 1) % self._ranks.size
            parts = self._ranks.gather(live.words, [boxes.size_of(box) for box in held], owner)
            if owner == self._ranks.index:
                yield live.name, _assembled(live, held, parts)

    def _raise_agreed(self, fault: RoseError | None) -> None:
        """Raise the first rank's fault, on every rank."""
        code = "corrupt_delta" if isinstance(fault, CorruptDelta) else "wrong_base"
        mine = None if fault is None else (code, fault.what)
        for each in self._ranks.agree(msgspec.json.encode(mine)):
            found = msgspec.json.decode(each, type=tuple[str, str] | None)
            if found is not None:
                raise (CorruptDelta if found[0] == "corrupt_delta" else WrongBase)(found[1])

    # ---- apply ----------------------------------------------------------------------------------

    def apply(self, staged: Staged) -> None:
        """Write a staged version; generation must be paused.  It can be taken back until it is settled.

        Raises ApplyFailed, with nothing changed, or WeightsMixed.
        """
        journal: list[tuple[_Write, torch.Tensor]] = []
        try:
            for write in staged.writes:
                before, same = write.do(write.words)
                journal.append((write, before))
                if not same:
                    raise ApplyFailed(f"{write.parameter.name}: reads back other bits than were written")
        except (ApplyFailed, RuntimeError, IndexError) as error:
            self._put_back(journal)
            raise ApplyFailed(f"version {staged.version} was taken back: {error}") from error
        self._written = _Written(self.version, tuple(journal))
        self.version = staged.version

    def take_back(self) -> None:
        """Undo the latest `apply`, if it is not settled; generation must be paused.  Raises WeightsMixed."""
        written, self._written = self._written, None
        if written is not None:
            self._put_back(written.journal)
            self.version = written.version_before

    def settle(self) -> None:
        """What was applied stays: let go of the way back."""
        self._written = None

    def _put_back(self, journal: Sequence[tuple[_Write, torch.Tensor]]) -> None:
        name = ""
        try:
            for write, before in reversed(journal):
                name = write.parameter.name
                if not write.do(before)[1]:
                    raise RuntimeError("reads back other bits than were written")
        except (RuntimeError, IndexError) as error:
            self._mixed = f"{name}: an update could not be taken back: {error}"
            raise WeightsMixed(self._mixed, "restart the engine") from error

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
        except (ApplyFailed, WeightsMixed) as error:
            return self._refusal(error)
        return {"version": version, "changed": staged.changed, "apply_ms": (time.monotonic() - started) * 1e3}

    def undo_applied(self) -> dict[str, Any]:
        """`take_back`; says what is held then, or that it is not known."""
        try:
            self.take_back()
        except WeightsMixed as error:
            return self._refusal(error)
        return {"version_held": self.version}

    def discard(self) -> dict[str, Any]:
        """Forget what is staged (a staging that still runs is waited for), and settle what was applied."""
        self.settle()
        if self._staging is not None:
            self._staging.exception()
            self._staging = None
        return {"version_held": self.version}

    def digests(self) -> dict[str, Any]:
        """xxh3-128 of live parameters' bytes, and the version they are said to be.

        With several ranks: of those whole on each, and this rank's share of the others; never while a version
        is being staged, as both talk to the other ranks.
        """

        def compute() -> dict[str, str]:
            return {
                name: RANKS_DIFFER if words is None else digest(words) for name, words in self._proven_here()
            }

        found = compute() if self._ranks.size == 1 else self._executor.submit(compute).result()
        return {"version": self.version, "digests": found}

    def close(self) -> None:
        """End the background thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _refusal(self, error: RoseError) -> dict[str, Any]:
        if isinstance(error, WeightsMixed) or self._mixed:
            return {"error": "weights_mixed", "detail": self._mixed}
        code = "apply_failed"
        if isinstance(error, WrongBase):
            code = "wrong_base"
        elif isinstance(error, CorruptDelta):
            code = "corrupt_delta"
        return {"error": code, "detail": error.what, "version_held": self.version}


def _assembled(live: LiveParameter, held: Sequence[Box], parts: Sequence[torch.Tensor]) -> Words | None:
    """All of a parameter, from the parts of all ranks; None where those that hold the same part differ."""
    words = np.zeros(math.prod(live.shape), word_dtype(live.dtype))
    for number, (box, part) in enumerate(zip(held, parts, strict=True)):
        if not boxes.size_of(box):
            continue
        mine = as_bits(part).words
        if box in held[:number] and not np.array_equal(boxes.take(words, live.shape, box), mine):
            return None
        boxes.put(words, live.shape, box, mine)
    return words


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
    positions, values = patch.indices, patch.values
    if not live.whole:
        if positions is None:
            values = boxes.take(values, live.shape, live.box)
        else:
            positions, values = boxes.localise(live.shape, live.box, positions, values)
    signed = np.array(values).view(f"<i{values.itemsize}" if values.itemsize > 1 else "u1")
    words = torch.from_numpy(signed).to(live.words.device)
    indices = None
    if positions is not None:
        indices = torch.from_numpy(np.array(positions)).to(live.words.device)
    return _Write(live, indices, words)
