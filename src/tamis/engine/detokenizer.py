"""The text of a reply as its tokens arrive."""

from collections.abc import Sequence

from tamis.engine.stop_strings import StopMatcher
from tamis.engine.tokenizer import Tokenizer


class Detokenizer:
    """Turns one reply's tokens into text, up to the first stop string.

    All that `push` and `finish` return, joined, is `tokenizer.decode` of all tokens, cut before the stop string that is
    complete first (see StopMatcher). `push` returns whole characters only and holds back what may be the start of a
    stop string. Special tokens are skipped unless told otherwise. The cost of a token does not grow with the text. With
    `continues` the text carries on from the prompt, and a SentencePiece model's space before the first word is kept.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str] = (),
        *,
        continues: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._decoder = tokenizer.text_decoder(continues=continues, skip_special_tokens=skip_special_tokens)
        self._stops = StopMatcher(stop_strings)

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text; nothing is returned after it."""
        return self._stops.matched

    def push(self, token_id: int) -> str:
        """Take the next token; returns the text that is certain now."""
        return self._stops.push(self._decoder.push(token_id))

    def finish(self) -> str:
        """There are no more tokens; returns the text that was held back. A second call returns nothing."""
        return self._stops.push(self._decoder.finish()) + self._stops.finish()
