"""The model's side of a step: a plain batch in, logits out."""

from collections.abc import Callable

import torch
from torch import Tensor

from tamis.engine.batch import Batch
from tamis.kernels import AttentionBatch, Ops, choose_layers, choose_model_ops, report_compiling
from tamis.kv import SparseKVPool
from tamis.models.attention import StepContext, go_on
from tamis.models.decoder import CausalLM
from tamis.progress import Progress

WARM_UP_TOKENS = 32
"""More rows than any kernel for few rows takes."""


def attention_batch(batch: Batch, device: torch.device | str = "cpu") -> AttentionBatch:
    """The kernels' view of `batch`: page tables in one int32 [B, P], -1 past each sequence's end."""
    columns = max((len(pages) for pages in batch.page_tables), default=0)
    table = [pages + [-1] * (columns - len(pages)) for pages in batch.page_tables]
    return AttentionBatch(
        page_table=torch.tensor(table, dtype=torch.int32, device=device).reshape(batch.num_seqs, columns),
        seq_lens=torch.tensor(batch.seq_lens, dtype=torch.int32, device=device),
        query_start=torch.tensor(batch.query_start, dtype=torch.int32, device=device),
        positions=torch.tensor(batch.positions, dtype=torch.int32, device=device),
    )


class Runner:
    """Runs a model over its pool with one kernel backend."""

    def __init__(self, model: CausalLM, pool: SparseKVPool, ops: Ops, device: torch.device | str = "cpu") -> None:
        self.model, self.pool, self.ops = model, pool, ops
        self.device = device
        self.model_ops = choose_model_ops(ops)
        self.layers = choose_layers(ops, self.model_ops)

    @torch.inference_mode()
    def run(self, batch: Batch, before_layer: Callable[[], None] = go_on) -> Tensor:
        """One forward pass: fp32 logits [R, vocab_size], a row for each of `batch.logit_rows`.

        `before_layer` is called before every layer; what it raises ends the pass and comes out here.
        Raises SlotError, before anything is written, where a slot lies outside the pool.
        """
        slots = self.pool.check_loc(self._ints(batch.slots))
        step = StepContext(self.pool, self.ops, attention_batch(batch, self.device), slots, self.model_ops,
                           self.layers, before_layer)  # fmt: skip
        logits: Tensor = self.model(self._ints(batch.token_ids), step, self._ints(batch.logit_rows))
        return logits

    def warm_up(self, progress: Progress) -> None:
        """Compile what the model's kernels need, by running a few tokens on the pool's padding page."""
        page_size = self.pool.layout.page_size
        with report_compiling(self.ops, progress):
            for tokens in (1, WARM_UP_TOKENS):
                batch = Batch()
                batch.add([0] * tokens, 0, [t % page_size for t in range(tokens)], [0] * -(-tokens // page_size), 1)
                self.run(batch)

    def close(self) -> None:
        """End what the kernels keep running."""
        self.ops.close()

    def _ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
