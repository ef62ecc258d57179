import torch

from tamis.engine.batch import Batch
from tamis.engine.runner import attention_batch


def two_rows() -> Batch:
    batch = Batch()
    batch.add([7, 8, 9], start=2, slots=[10, 11, 12], pages=[2, 3], num_logits=1)
    batch.add([5], start=0, slots=[20], pages=[5], num_logits=1)
    batch.add([1, 2], start=0, slots=[24, 25], pages=[6], num_logits=0)
    return batch


def test_rows_are_laid_end_to_end() -> None:
    batch = two_rows()
    assert batch.token_ids == [7, 8, 9, 5, 1, 2]
    assert batch.positions == [2, 3, 4, 0, 0, 1]
    assert batch.slots == [10, 11, 12, 20, 24, 25]
    assert batch.seq_lens == [5, 1, 2]
    assert batch.query_start == [0, 3, 4, 6]
    assert batch.logit_rows == [2, 3]
    assert (batch.num_tokens, batch.num_seqs) == (6, 3)


def test_logits_of_several_tokens_are_the_last_ones() -> None:
    batch = Batch()
    batch.add([1, 2, 3], start=0, slots=[4, 5, 6], pages=[1], num_logits=3)
    batch.add([4, 5, 6], start=0, slots=[8, 9, 10], pages=[2], num_logits=2)
    assert batch.logit_rows == [0, 1, 2, 4, 5]


def test_a_batch_keeps_its_own_page_list() -> None:
    pages = [1]
    batch = Batch()
    batch.add([1], start=0, slots=[4], pages=pages, num_logits=1)
    pages.append(2)
    assert batch.page_tables == [[1]]


def test_page_tables_are_padded_with_minus_one() -> None:
    attention = attention_batch(two_rows())
    assert attention.page_table.tolist() == [[2, 3], [5, -1], [6, -1]]
    assert {t.dtype for t in (attention.page_table, attention.seq_lens, attention.query_start)} == {torch.int32}
    assert attention.positions.tolist() == [2, 3, 4, 0, 0, 1]
    attention.check(page_size=4, num_pages=6)


def test_an_empty_batch_has_empty_tensors() -> None:
    attention = attention_batch(Batch())
    assert attention.page_table.shape == (0, 0)
    assert attention.query_start.tolist() == [0]
