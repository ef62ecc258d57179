"""Text that the model writes itself: it is what its own replies look like to the index branch later."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tamis.engine.llm import LLM
from tamis.progress import Progress
from tamis.request import SamplingParams

REPLY_TOKENS = 1024
AT_ONCE = 16
STEP_TOKENS = 256

QUESTIONS = (
    "Write a long story about a lighthouse keeper.", "Explain how photosynthesis works, in detail.",
    "Write a Python module for a bank account, with tests.", "Describe the history of the Roman Empire.",
    "Write a dialogue between a teacher and a curious student about the stars.",
    "Give me a detailed recipe for vegetable soup, and say why each step matters.",
    "Write a C program that sorts a linked list, and explain it line by line.",
    "Compare trains, ships and planes for carrying goods.", "Write a letter from a sailor to his family.",
    "List thirty facts about the human body, with a sentence on each.",
    "Explain the rules of chess to a beginner.", "Write an essay about why people travel.",
    "Write JavaScript code for a to-do list, and describe every function.",
    "Tell the life of an imaginary inventor from birth to old age.",
    "Explain supply and demand with many examples.", "Write a detective story set in a small village.",
)  # fmt: skip


def write_windows(
    model: str, length: int, count: int, seed: int, progress: Progress, threads: int | None
) -> list[Tensor]:
    """`count` windows of `length` tokens of the model's own replies, sampled at temperature 1; int64 each."""
    if not count:
        return []
    ids: list[int] = []
    progress.start("writing text", count * length, "tokens")
    try:
        with LLM(model, max_num_seqs=AT_ONCE, threads=threads) as llm:
            while len(ids) < count * length:
                new = [token for reply in _replies(llm, length, seed + len(ids)) for token in reply]
                progress.advance(len(new))
                ids += new
    finally:
        progress.finish()
    return list(torch.split(torch.tensor(ids[: count * length], dtype=torch.int64), length))


def _replies(llm: LLM, length: int, seed: int) -> list[Sequence[int]]:
    """Questions and replies, as many as run at once; a model without a chat template goes on from the bare question."""
    most = min(REPLY_TOKENS, length)
    tokenizer = llm.tokenizer
    prompts = [
        tokenizer.encode_chat([{"role": "user", "content": question}])
        if tokenizer.has_chat_template
        else tokenizer.encode(question)
        for question in QUESTIONS
    ]
    sampling = [SamplingParams(temperature=1.0, max_tokens=most, seed=seed + i) for i in range(len(prompts))]
    done = llm.generate(prompts, sampling)
    return [[*each.prompt_token_ids, *each.token_ids] for each in done]
