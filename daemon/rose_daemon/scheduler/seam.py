"""Text across the seam between two attempts of a turn.

Each attempt is detokenised by its own engine.  Where a cut falls inside a character of several tokens, the
first engine has held those tokens back and the second cannot know them (vLLM then even repeats the prompt's
text).  So the first text after a seam is computed anew, from all tokens so far.
"""

from __future__ import annotations

from collections.abc import Sequence

from rose_daemon.scheduler.upstream import Upstream

_CONTEXT_TOKENS = 8
"""Prompt tokens decoded along, so that tokenizers that trim the first space of a text do not trim ours."""
_UNFINISHED = "\ufffd"
_SPECIALS_MAX = 4096


class SpecialTokens:
    """Tokens of one model that stand for no text, learnt from those that engines showed none for.

    /detokenize shows special tokens and completions hide them; nothing in vLLM's API lists them.
    """

    def __init__(self, upstream: Upstream, model: str) -> None:
        self._upstream = upstream
        self._model = model
        self._special: dict[int, bool] = {}

    async def learn(self, url: str, silent: Sequence[int]) -> None:
        """Look at tokens that came without text.  Raises NotReady.

        Such a token is special if it has a text of its own; parts of a character have none.
        """
        for token in sorted(set(silent) - self._special.keys()):
            if len(self._special) >= _SPECIALS_MAX:
                return
            text = await self._upstream.detokenize(url, self._model, [token])
            self._special[token] = bool(text) and _UNFINISHED not in text

    def without(self, tokens: Sequence[int]) -> list[int]:
        """`tokens` without those known to be special."""
        return [token for token in tokens if not self._special.get(token, False)]


async def text_so_far(
    upstream: Upstream, url: str, model: str, prompt_token_ids: Sequence[int], token_ids: Sequence[int]
) -> str:
    """Text of `token_ids` where they follow that prompt.  Raises NotReady."""
    context = list(prompt_token_ids[-_CONTEXT_TOKENS:])
    before = await upstream.detokenize(url, model, context)
    whole = await upstream.detokenize(url, model, [*context, *token_ids])
    return whole.removeprefix(before)


def text_after(shown: str, whole: str) -> str:
    """What is to be added to `shown` to make it `whole`.

    Where they do not agree (a tokenizer that rewrites earlier text), only the length can be matched.
    """
    return whole[len(shown) :]
