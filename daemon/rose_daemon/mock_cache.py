"""The prefix cache of the mock engine: which prompt tokens it would not have to compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

BLOCK_TOKENS = 16


class PrefixCache:
    """Whole blocks, each known by all that stands before it; nothing is ever evicted.

    `root` is what sets prefixes apart beside their tokens: the weights, a salt.
    """

    def __init__(self) -> None:
        self._blocks: set[int] = set()
        self.hit_tokens = 0

    def look_up(self, prompts: Sequence[Sequence[int]], root: tuple[object, ...]) -> int:
        """Prompt tokens found; the prompts are in the cache from now on."""
        found = 0
        for prompt in prompts:
            for key in _keys(prompt[:-1], root):
                if key not in self._blocks:
                    break
                found += BLOCK_TOKENS
            self.keep(prompt, root)
        self.hit_tokens += found
        return found

    def keep(self, tokens: Sequence[int], root: tuple[object, ...]) -> None:
        """Take in the blocks of a sequence."""
        self._blocks.update(_keys(tokens, root))


def _keys(tokens: Sequence[int], root: tuple[object, ...]) -> Iterator[int]:
    key = hash(root)
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        key = hash((key, *tokens[start : start + BLOCK_TOKENS]))
        yield key
