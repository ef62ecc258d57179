"""The model's side of a step: a plain batch in, logits out."""

import torch
from torch import Tensor

from tamis.engine.batch import Batch
from tamis.kernels import AttentionBatch, Ops
from tamis.kv import SparseKVPool
from tamis.models.attention import StepContext
from tamis.models.decoder import CausalLM


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

    @torch.inference_mode()
    def run(self, batch: Batch) -> Tensor:
        """One forward pass: fp32 logits [R, vocab_size], a row for each of `batch.logit_rows`.

        Raises SlotError, before anything is written, where a slot lies outside the pool.
        """
        slots = self.pool.check_loc(self._ints(batch.slots))
        step = StepContext(self.pool, self.ops, attention_batch(batch, self.device), slots)
        logits: Tensor = self.model(self._ints(batch.token_ids), step, self._ints(batch.logit_rows))
        return logits

    def _ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
