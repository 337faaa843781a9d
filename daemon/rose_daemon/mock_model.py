"""A model for tests: tokens are bytes, and the next one is a fixed function of those before it.

Whatever way a turn takes through aborts and engines, its tokens must equal those of an undisturbed run; with
this model that can be checked without one.  Text holds characters of two tokens, so that cuts inside a
character happen.
"""

from __future__ import annotations

import codecs
import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

BOS, EOS, HEADER = 256, 257, 258
SPECIAL = {BOS: "<bos>", EOS: "<eos>", HEADER: "<|>"}
VOCABULARY = 259
_LEAD = 0xC3
"""First byte of the two-byte characters (U+00C0 to U+00FF)."""
_PRINTABLE = range(0x20, 0x7F)


class Sample(NamedTuple):
    """One sampled token, its log probability, and the runner-up's."""

    token: int
    logprob: float
    second: int
    second_logprob: float


def encode(text: str) -> list[int]:
    """Token ids of a text."""
    return list(text.encode("utf-8"))


def decode(tokens: Sequence[int]) -> str:
    """Text of tokens, special ones included, as /detokenize gives it."""
    text, run = [], bytearray()
    for token in tokens:
        if token in SPECIAL:
            text += [run.decode("utf-8", errors="replace"), SPECIAL[token]]
            run.clear()
        else:
            run.append(token)
    return "".join([*text, run.decode("utf-8", errors="replace")])


def chat_prompt(messages: Sequence[dict[str, object]]) -> list[int]:
    """The chat template."""
    tokens = [BOS]
    for message in messages:
        tokens += [HEADER, *encode(f"{message.get('role', '')}\n{message.get('content', '')}\n")]
    return [*tokens, HEADER, *encode("assistant\n")]


def sample(tokens: Sequence[int], version: int, state: str = "") -> Sample:
    """The token that follows `tokens` under weights `version`; `state` is what else the draw depends on."""
    image = ",".join(map(str, tokens[-64:])) + f"|{len(tokens)}|{version}{state}"
    draw = hashlib.blake2b(image.encode(), digest_size=4).digest()
    second = _PRINTABLE[draw[3] % len(_PRINTABLE)]
    if tokens and tokens[-1] == _LEAD:
        token = 0x80 + draw[0] % 64
    elif draw[1] < 4:
        token = EOS
    elif draw[2] < 64:
        token = _LEAD
    else:
        token = _PRINTABLE[draw[0] % len(_PRINTABLE)]
    share = 0.5 + draw[1] / 600
    return Sample(token, math.log(share), second, math.log(1 - share))


class TextStream:
    """Text of a growing output, as a completion shows it: no special tokens, whole characters only."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """The text that `token` completes."""
        return "" if token in SPECIAL else self._decoder.decode(bytes([token]))
