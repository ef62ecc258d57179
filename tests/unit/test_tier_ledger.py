import time

from tamis.kv.tiers.ledger import Ledger

A, B, C, D = (bytes([number]) * 32 for number in range(4))


def ledger(*entries: tuple[bytes, int, float]) -> Ledger:
    made = Ledger()
    for entry in entries:
        made.add(*entry)
    return made


def test_bytes_are_those_of_all_entries() -> None:
    made = ledger((A, 10, 1.0), (B, 20, 2.0), (A, 15, 3.0))
    assert (len(made), made.bytes) == (2, 35)
    assert (made.remove(A), made.remove(A), made.bytes) == (15, 0, 20)


def test_victims_are_the_least_recently_used_that_nobody_spares() -> None:
    made = ledger((A, 10, 3.0), (B, 10, 1.0), (C, 10, 2.0), (D, 10, 0.0))
    assert made.victims(0, lambda _: False) == []
    assert made.victims(1, lambda _: False) == [D]
    assert made.victims(11, lambda key: key == D) == [B, C]
    assert made.victims(1000, lambda key: key == D) == [B, C, A]
    made.touch(B, 4.0)
    made.touch(A, 2.5)  # an older use says nothing
    assert made.victims(1000, lambda _: False) == [D, C, A, B]


def test_what_was_noted_while_the_store_was_listed_is_kept() -> None:
    made = ledger((A, 10, 1.0), (B, 10, 1.0))
    begun = time.monotonic()
    made.add(C, 30, 5.0)
    made.replace([(A, 11, 2.0), (D, 40, 0.0)], begun)
    assert {key: (note.bytes, note.used) for key, note in made.notes.items()} == {
        A: (11, 2.0), C: (30, 5.0), D: (40, 0.0),
    }  # fmt: skip
    assert made.bytes == 81
