"""How many prompt tokens a step may compute while replies are running, by what tokens have cost so far."""

FIRST_CHUNK = 32
"""Prompt tokens beside replies while nothing has been measured."""
LEAST_CHUNK = 16
"""Prompts go on however slow the machine is."""
_KEPT = 0.8
"""What an older measurement counts for, each time a new one comes."""
_MOST = 4.0
"""A step that takes longer than this times what was expected counts as no more: the machine may have been away."""
_SCALE = 1000.0
"""Context is counted in thousands of tokens, so that both costs are of one size."""


class StepPace:
    """A moving estimate of what a prompt token costs: so much, and so much more for each token of context before it.

    A step without prompt tokens shows what the replies alone take; the rest of a step that has both is the prompts'.
    """

    def __init__(self, step_seconds: float | None) -> None:
        """`step_seconds`: what a step aims to take; None: no limit."""
        self.step_seconds = step_seconds
        self._replies = 0.0
        """Seconds of a step with replies only."""
        # Sums of n * n, n * m, m * m, n * seconds, m * seconds of steps with n prompt tokens and m = n * context.
        self._nn = self._nm = self._mm = self._ns = self._ms = 0.0

    def observe(self, *, replies: int, prompt_tokens: int, context: float, seconds: float) -> None:
        """A step of so many replies and prompt tokens, these at `context` tokens on average, took so long."""
        if not prompt_tokens:
            known = self._replies or seconds
            self._replies = _KEPT * known + (1 - _KEPT) * min(seconds, _MOST * known)
            return
        n, m = float(prompt_tokens), prompt_tokens * context / _SCALE
        # What a step costs at all is measured with the replies; without any it is part of the prompt's cost.
        left = max(seconds - self._replies, seconds / 2) if replies else seconds
        expected = n * self.token_seconds(context)
        if expected:
            left = min(left, _MOST * expected)
        for name, value in (("_nn", n * n), ("_nm", n * m), ("_mm", m * m), ("_ns", n * left), ("_ms", m * left)):
            setattr(self, name, _KEPT * getattr(self, name) + value)

    def token_seconds(self, context: float) -> float:
        """What a prompt token at `context` costs; 0: nothing is known yet."""
        if not self._nn:
            return 0.0
        flat, sloped = self._ns / self._nn, 0.0
        spread = self._nn * self._mm - self._nm**2
        # Measurements at one context alone cannot tell the two costs apart.
        if spread > 1e-3 * self._nn * self._mm:
            slope = (self._nn * self._ms - self._nm * self._ns) / spread
            base = (self._mm * self._ns - self._nm * self._ms) / spread
            if slope > 0 and base > 0:
                flat, sloped = base, slope
        return flat + sloped * context / _SCALE

    def prompt_tokens(self, context: float) -> int | None:
        """How many tokens at `context` a step with replies takes so that it ends in about `step_seconds`; None: any.

        Where the replies alone take most of that or more, a step may take half as long again.
        """
        if self.step_seconds is None:
            return None
        cost = self.token_seconds(context)
        if not cost:
            return FIRST_CHUNK
        seconds = max(self.step_seconds - self._replies, max(self.step_seconds, self._replies) / 2)
        return max(LEAST_CHUNK, int(seconds / cost))
