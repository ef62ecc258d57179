import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from support.kv import fill_random, small_layout
from tamis.errors import (
    ConfigError,
    ForeignPageError,
    LayerNotLocalError,
    NoIndexValueError,
    NotALayerIdError,
    NotSparseLayerError,
    SlotError,
    TamisError,
    TransferError,
)
from tamis.kv import INDEX, MAIN, LayerPart, LayerTransferCounter, SparseKVPool, TransferTicket


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


def still_waits(call: Future[object]) -> bool:
    """Whether the call is blocked; gives it a moment to get there."""
    time.sleep(0.02)
    return not call.done()


def consumed(counter: LayerTransferCounter) -> TransferTicket:
    ticket = counter.begin()
    counter.consume([ticket])
    return ticket


def test_nothing_waits_where_nothing_is_loading() -> None:
    counter = LayerTransferCounter(3)
    counter.wait_until(2)
    counter.begin()
    counter.wait_until(2)
    counter.consume([])
    counter.wait_until(2)


def test_a_part_is_waited_for_on_its_own(thread: ThreadPoolExecutor) -> None:
    counter = LayerTransferCounter(3)
    ticket = consumed(counter)
    main: Future[object] = thread.submit(counter.wait_until, 1, MAIN)
    index: Future[object] = thread.submit(counter.wait_until, 1, INDEX)
    assert still_waits(main)
    counter.complete(ticket, 0)
    counter.complete(ticket, 1, INDEX)
    index.result(5)
    assert still_waits(main)
    counter.complete(ticket, 1, MAIN)
    main.result(5)


def test_complete_means_both_parts_unless_told() -> None:
    counter = LayerTransferCounter(2)
    ticket = consumed(counter)
    counter.complete(ticket, 1)
    counter.wait_until(1)
    counter.wait_until(1, MAIN | INDEX)


def test_every_consumed_load_is_waited_for(thread: ThreadPoolExecutor) -> None:
    counter = LayerTransferCounter(1)
    tickets = [counter.begin(), counter.begin(), counter.begin()]
    counter.consume(tickets[:2])
    reader: Future[object] = thread.submit(counter.wait_until, 0)
    counter.complete(tickets[0], 0)
    assert still_waits(reader)
    counter.complete(tickets[1], 0)
    reader.result(5)
    counter.consume(tickets[:1])
    counter.wait_until(0)


def test_a_failed_load_wakes_the_reader_with_its_cause(thread: ThreadPoolExecutor) -> None:
    counter = LayerTransferCounter(2)
    ticket = consumed(counter)
    counter.complete(ticket, 0)
    reader: Future[object] = thread.submit(counter.wait_until, 1)
    assert still_waits(reader)
    cause = OSError("disk\ngone")
    counter.fail(ticket, cause)
    counter.fail(ticket, OSError("later"))
    with pytest.raises(TransferError) as caught:
        reader.result(5)
    assert str(caught.value) == r"the load of local layer 1 failed: OSError('disk\ngone')"
    assert caught.value.__cause__ is cause
    with pytest.raises(TransferError):
        counter.wait_until(0)


def test_an_abandoned_load_wakes_the_reader(thread: ThreadPoolExecutor) -> None:
    counter = LayerTransferCounter(2)
    ticket = consumed(counter)
    counter.complete(ticket, 0)
    reader: Future[object] = thread.submit(counter.wait_until, 1)
    assert still_waits(reader)
    counter.release(ticket)
    with pytest.raises(TransferError, match=r"^the load of local layer 1 was released before it was complete$"):
        reader.result(5)
    with pytest.raises(TransferError, match=r"^the load of local layer 0 was released before it was complete$"):
        counter.wait_until(0)


def test_a_complete_load_may_be_released_before_it_is_read() -> None:
    counter = LayerTransferCounter(2)
    ticket = consumed(counter)
    for layer in range(2):
        counter.complete(ticket, layer)
    counter.release(ticket)
    counter.wait_until(1)


def test_a_load_that_never_starts_raises_at_its_deadline() -> None:
    """Case D7, the counter's part: the reader gets an error, not a hang."""
    counter = LayerTransferCounter(8, timeout=0.05)
    ticket = consumed(counter)
    counter.complete(ticket, 3, MAIN)
    start = time.monotonic()
    with pytest.raises(TransferError, match=r"^local layer 3 \(index\) did not arrive within 0\.05 s$"):
        counter.wait_until(3)
    assert time.monotonic() - start < 2
    with pytest.raises(TransferError, match=r"^local layer 4 \(main and index\) did not arrive within 0\.05 s$"):
        counter.wait_until(4)
    counter.wait_until(3, MAIN)


def test_slots_are_bounded_and_come_back(thread: ThreadPoolExecutor) -> None:
    counter = LayerTransferCounter(1, slots=2)
    first, _ = counter.begin(), counter.begin()
    third: Future[object] = thread.submit(counter.begin)
    assert still_waits(third)
    counter.release(first)
    assert isinstance(third.result(5), TransferTicket)


def test_no_slot_within_the_timeout_is_an_error() -> None:
    counter = LayerTransferCounter(1, slots=1, timeout=0.05)
    counter.begin()
    with pytest.raises(TransferError, match=r"^no transfer slot came free within 0\.05 s: all 1 are taken$"):
        counter.begin()


def test_a_released_ticket_takes_no_more_reports() -> None:
    counter = LayerTransferCounter(1)
    ticket = counter.begin()
    counter.release(ticket)
    calls: list[Callable[[], None]] = [
        lambda: counter.complete(ticket, 0),
        lambda: counter.fail(ticket, OSError()),
        lambda: counter.release(ticket),
    ]
    for call in calls:
        with pytest.raises(TransferError, match=r"^TransferTicket\(1\) has been released already$"):
            call()


def test_a_ticket_of_another_counter_is_refused() -> None:
    counter, other = LayerTransferCounter(1), LayerTransferCounter(1)
    ticket = other.begin()
    calls: list[Callable[[], None]] = [lambda: counter.consume([ticket]), lambda: counter.complete(ticket, 0)]
    for call in calls:
        with pytest.raises(TransferError, match=r"^TransferTicket\(1\) belongs to another transfer counter$"):
            call()


@pytest.mark.parametrize("layer", [-1, 3])
def test_layers_are_local_and_never_wrap(layer: int) -> None:
    counter = LayerTransferCounter(3)
    ticket = consumed(counter)
    calls: list[Callable[[], None]] = [lambda: counter.wait_until(layer), lambda: counter.complete(ticket, layer)]
    for call in calls:
        with pytest.raises(LayerNotLocalError, match=rf"^local_layer={layer} is not in 0 <= id < 3$"):
            call()
    with pytest.raises(NotALayerIdError):
        counter.wait_until(True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_layers": 0}, "num_layers=0 must be a whole number of at least 1"),
        ({"num_layers": 1, "slots": 0}, "slots=0 must be a whole number of at least 1"),
        ({"num_layers": 1, "timeout": 0}, f"timeout=0 must be above 0 and at most {threading.TIMEOUT_MAX:g} seconds"),
        (
            {"num_layers": 1, "timeout": float("inf")},
            f"timeout=inf must be above 0 and at most {threading.TIMEOUT_MAX:g} seconds",
        ),
        (
            {"num_layers": 1, "timeout": 1e10},
            f"timeout=10000000000.0 must be above 0 and at most {threading.TIMEOUT_MAX:g} seconds",
        ),
    ],
)
def test_bad_counters_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LayerTransferCounter(**arguments)
    assert str(caught.value) == message


class Load:
    """Imports one page of `source` into `target`, layer by layer, a little later each, as a loader thread would."""

    def __init__(self, source: SparseKVPool, target: SparseKVPool, counter: LayerTransferCounter) -> None:
        self._blob = source.export_pages([1])
        self._target = target
        self._counter = counter
        self.reading = threading.Event()

    def run(self, ticket: TransferTicket) -> None:
        assert self.reading.wait(5)
        for local, layer in enumerate(self._target.layout.local_layers):
            time.sleep(0.002)
            self._target.import_pages([2], self._blob, [layer])
            self._counter.complete(ticket, local)


@pytest.mark.parametrize("start", [0, 2])
def test_index_reads_wait_for_their_layer(thread: ThreadPoolExecutor, start: int) -> None:
    """Case D1: 20 times of 20, on a pipeline stage too."""
    layout = small_layout(start_layer=start)
    source = SparseKVPool(layout, 2)
    fill_random(source)
    expected = source.get_index_k_buffer(3)[1].clone()
    for _ in range(20):
        target = SparseKVPool(layout, 2)
        counter = LayerTransferCounter(len(layout.local_layers))
        target.register_layer_transfer_counter(counter)
        load = Load(source, target, counter)
        ticket = consumed(counter)
        loader = thread.submit(load.run, ticket)
        load.reading.set()
        assert torch.equal(target.get_index_k_buffer(3)[2], expected)
        loader.result(5)


READS: dict[str, tuple[Callable[[SparseKVPool], object], LayerPart]] = {
    "key": (lambda pool: pool.get_key_buffer(3), MAIN),
    "value": (lambda pool: pool.get_value_buffer(3), MAIN),
    "kv": (lambda pool: pool.get_kv_buffer(3), MAIN),
    "index_k": (lambda pool: pool.get_index_k_buffer(3), INDEX),
    "index_kv": (lambda pool: pool.get_index_kv_buffer(3), INDEX),
    "export": (lambda pool: pool.export_pages([1]), MAIN | INDEX),
    "copy_pages": (lambda pool: pool.copy_pages([1], [2]), MAIN | INDEX),
    "copy_slots": (lambda pool: pool.copy_slots(torch.tensor([4]), torch.tensor([8])), MAIN | INDEX),
}


@pytest.mark.parametrize("name", READS)
def test_every_read_waits_for_its_parts_only(name: str, thread: ThreadPoolExecutor) -> None:
    read, parts = READS[name]
    for missing in parts:
        pool = SparseKVPool(small_layout(start_layer=2), 2)
        counter = LayerTransferCounter(4)
        pool.register_layer_transfer_counter(counter)
        ticket = consumed(counter)
        for local in (0, 2, 3):
            counter.complete(ticket, local)
        counter.complete(ticket, 1, parts & ~missing)
        reader: Future[object] = thread.submit(read, pool)
        assert still_waits(reader)
        counter.complete(ticket, 1, missing)
        reader.result(5)


@pytest.mark.parametrize("name", READS)
def test_no_read_yields_bytes_of_a_failed_load(name: str) -> None:
    pool = SparseKVPool(small_layout(), 2)
    counter = LayerTransferCounter(6)
    pool.register_layer_transfer_counter(counter)
    ticket = consumed(counter)
    counter.fail(ticket, OSError("gone"))
    with pytest.raises(TransferError):
        READS[name][0](pool)
    pool.register_layer_transfer_counter(None)
    READS[name][0](pool)


@pytest.mark.parametrize(
    ("read", "error"),
    [
        (lambda pool: pool.get_key_buffer(6), LayerNotLocalError),
        (lambda pool: pool.get_value_buffer(-1), LayerNotLocalError),
        (lambda pool: pool.get_kv_buffer(6), LayerNotLocalError),
        (lambda pool: pool.get_index_k_buffer(6), LayerNotLocalError),
        (lambda pool: pool.get_index_kv_buffer(6), LayerNotLocalError),
        (lambda pool: pool.get_kv_buffer("3"), NotALayerIdError),
        (lambda pool: pool.get_index_k_buffer(True), NotALayerIdError),
        (lambda pool: pool.get_index_k_buffer(0), NotSparseLayerError),
        (lambda pool: pool.get_index_kv_buffer(0), NoIndexValueError),
        (lambda pool: pool.get_index_kv_buffer(1), NoIndexValueError),
        (lambda pool: pool.make_resident(4, torch.zeros(1)), NotSparseLayerError),
        (lambda pool: pool.export_pages([3]), ForeignPageError),
        (lambda pool: pool.copy_pages([1], [3]), ForeignPageError),
        (lambda pool: pool.copy_slots(torch.tensor([0]), torch.tensor([4])), SlotError),
    ],
)
def test_what_cannot_be_read_raises_at_once_while_loading(
    read: Callable[[SparseKVPool], object], error: type[TamisError]
) -> None:
    """The check comes before the wait, in every reader: nothing is complete here, so a wait would end in an error."""
    pool = SparseKVPool(small_layout(), 2)
    counter = LayerTransferCounter(6, timeout=0.2)
    pool.register_layer_transfer_counter(counter)
    consumed(counter)
    with pytest.raises(error):
        read(pool)


def test_dense_layers_have_no_index_to_wait_for() -> None:
    pool = SparseKVPool(small_layout(end_layer=1), 2)
    counter = LayerTransferCounter(1)
    pool.register_layer_transfer_counter(counter)
    counter.complete(consumed(counter), 0, MAIN)
    pool.export_pages([1])


def test_a_counter_of_another_size_is_refused() -> None:
    pool = SparseKVPool(small_layout(start_layer=2), 2)
    with pytest.raises(ConfigError, match=r"^the transfer counter has 6 layers, this pipeline stage 4$"):
        pool.register_layer_transfer_counter(LayerTransferCounter(6))


@pytest.mark.parametrize("planes", ["main", 1, None])
def test_parts_are_layer_parts(planes: Any) -> None:
    counter = LayerTransferCounter(2)
    ticket = consumed(counter)
    message = rf"^planes={planes!r} is not MAIN, INDEX or both$"
    with pytest.raises(TransferError, match=message):
        counter.complete(ticket, 0, planes)
    with pytest.raises(TransferError, match=message):
        counter.wait_until(0, planes)
    with pytest.raises(TransferError, match=r"^there is nothing to wait for in planes="):
        counter.wait_until(0, LayerPart(0))


@pytest.mark.parametrize("cause", ["disk full", None])
def test_a_load_fails_with_an_exception(cause: Any) -> None:
    counter = LayerTransferCounter(2, timeout=0.05)
    ticket = consumed(counter)
    with pytest.raises(TransferError, match=rf"^error={cause!r} is not an exception$"):
        counter.fail(ticket, cause)
    with pytest.raises(TransferError, match="did not arrive"):
        counter.wait_until(0)


def test_tickets_are_tickets_and_iterators_are_read_whole() -> None:
    counter = LayerTransferCounter(1, timeout=0.05)
    with pytest.raises(TransferError, match=r"^5 is not a transfer ticket$"):
        counter.complete(5, 0)  # type: ignore[arg-type]
    with pytest.raises(TransferError, match=r"^5 is not a transfer ticket$"):
        counter.consume([5])  # type: ignore[list-item]
    with pytest.raises(TransferError, match=r"^tickets=None is not a sequence$"):
        counter.consume(None)  # type: ignore[arg-type]
    counter.consume(iter([counter.begin()]))
    with pytest.raises(TransferError, match="did not arrive"):
        counter.wait_until(0)


def test_a_load_may_be_given_less_time_and_less_time_between_its_parts() -> None:
    counter = LayerTransferCounter(2, timeout=60)
    ticket = counter.begin(timeout=0.05)
    counter.consume([ticket])
    with pytest.raises(TransferError, match=r"^local layer 1 \(main and index\) did not arrive within 0.05 s$"):
        counter.wait_until(1)
    assert counter.is_late(ticket)
    counter.release(ticket)
    pausing = counter.begin(pause=0.05)
    counter.consume([pausing])
    counter.complete(pausing, 0)
    with pytest.raises(TransferError, match=r"^local layer 1 \(main\): nothing came for 0.05 s$"):
        counter.wait_until(1, MAIN)
    assert counter.is_late(pausing)
    counter.complete(pausing, 1)
    assert not counter.is_late(pausing), "a part that comes gives the next one time again"
    counter.wait_for_all()


def test_whoever_waits_asks_now_and_then_whether_it_is_still_worth_it() -> None:
    counter, asked = LayerTransferCounter(1, timeout=60), 0

    class Enough(Exception):
        pass

    def give_up() -> None:
        nonlocal asked
        asked += 1
        if asked == 3:
            raise Enough

    counter.consume([counter.begin()], give_up)
    with pytest.raises(Enough):
        counter.wait_until(0)
    assert counter.waited > 0


def test_all_parts_are_waited_for(thread: ThreadPoolExecutor) -> None:
    counter = LayerTransferCounter(2)
    ticket = consumed(counter)
    whole: Future[object] = thread.submit(counter.wait_for_all)
    counter.complete(ticket, 0)
    counter.complete(ticket, 1, MAIN)
    assert still_waits(whole)
    counter.complete(ticket, 1, INDEX)
    whole.result(5)
