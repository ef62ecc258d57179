"""The pool against a dictionary: whatever is done, in whatever layout, nothing but the written slots changes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from support.kv import DENSE, DTYPES, SPARSE_K, SPARSE_KV, plane
from tamis.config import LayerKind
from tamis.errors import (
    ForeignPageError,
    LayerNotLocalError,
    NoIndexValueError,
    NotALayerIdError,
    NotKeyOnlyLayerError,
    NotSparseLayerError,
    PageError,
    PlaneError,
    SlotError,
)
from tamis.kv import KVLayout, LayerScales, PageBlob, SlotIds, SparseKVPool

NAMES = {DENSE: ("k", "v"), SPARSE_K: ("k", "v", "index_k"), SPARSE_KV: ("k", "v", "index_k", "index_v")}
INPUT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

Row = list[float]
Cells = dict[tuple[int, str, int], Row]


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    kinds = tuple(draw(st.lists(st.sampled_from(LayerKind), min_size=1, max_size=6)))
    start = draw(st.integers(0, len(kinds) - 1))
    scale = st.sampled_from((0.25, 0.3, 1.0, 2.0))
    scales = st.lists(st.builds(LayerScales, scale, scale, scale, scale), min_size=len(kinds), max_size=len(kinds))
    return KVLayout(
        layer_kinds=kinds,
        kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 4)),
        index_head_dim=draw(st.integers(1, 4)),
        page_size=draw(st.sampled_from((1, 2, 3, 4))),
        dtype=draw(st.sampled_from(DTYPES)),
        index_dtype=draw(st.sampled_from((None, *DTYPES))),
        start_layer=start,
        end_layer=draw(st.one_of(st.none(), st.integers(start + 1, len(kinds)))),
        scales=draw(st.one_of(st.none(), scales.map(tuple))),
    )


def stored(row: Row, dtype: torch.dtype, scale: float) -> Row:
    """One row as it should be read back, value by value."""
    result = []
    for value in row:
        divided = float(torch.tensor(value, dtype=torch.float32) / scale)
        if dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            largest = torch.finfo(dtype).max
            divided = min(max(divided, -largest), largest)
        result.append(float(torch.tensor(divided, dtype=torch.float32).to(dtype).float()))
    return result


@dataclass
class Twin:
    """A pool, and the dictionary that says what each of its cells should hold."""

    pool: SparseKVPool
    cells: Cells = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layout = self.pool.layout
        self.end = (self.pool.num_pages + 1) * self.layout.page_size
        for layer, name in self.planes():
            heads, dim = self.shape(name)
            for slot in range(self.end):
                self.cells[layer, name, slot] = [0.0] * (heads * dim)

    @property
    def layers(self) -> range:
        end = self.layout.end_layer
        return range(self.layout.start_layer, len(self.layout.layer_kinds) if end is None else end)

    def planes(self) -> list[tuple[int, str]]:
        return [(layer, name) for layer in self.layers for name in NAMES[self.layout.layer_kinds[layer]]]

    def shape(self, name: str) -> tuple[int, int]:
        return (self.layout.kv_heads, self.layout.head_dim) if name in "kv" else (1, self.layout.index_head_dim)

    def put(self, layer: int, name: str, slot: int, row: Row) -> None:
        dtype = self.layout.dtype
        if name not in "kv":
            dtype = self.layout.index_dtype or (torch.bfloat16 if dtype.itemsize == 1 else dtype)
        scales = self.layout.scales
        scale = 1.0 if scales is None else float(getattr(scales[layer], name))
        self.cells[layer, name, slot] = stored(row, dtype, scale)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        before = dict(self.cells)
        for layer, name in self.planes():
            for source, target in pairs:
                self.cells[layer, name, target] = before[layer, name, source]

    def check(self) -> None:
        for layer, name in self.planes():
            held = plane(self.pool, layer, name).float().permute(0, 2, 1, 3).flatten(2).flatten(0, 1).tolist()
            expected = [self.cells[layer, name, slot] for slot in range(self.end)]
            assert held == expected, (layer, name)


class PoolMachine(RuleBasedStateMachine):
    """Two pools of one layout; each step changes one of them, and both are compared in full after it."""

    twins: tuple[Twin, Twin]
    blobs: list[tuple[PageBlob, list[int], Cells]]

    @initialize(layout=layouts(), num_pages=st.tuples(st.integers(2, 4), st.integers(2, 4)))
    def start(self, layout: KVLayout, num_pages: tuple[int, int]) -> None:
        self.twins = (Twin(SparseKVPool(layout, num_pages[0])), Twin(SparseKVPool(layout, num_pages[1])))
        self.blobs = []

    @invariant()
    def nothing_else_changed(self) -> None:
        for twin in self.twins:
            twin.check()

    @rule(data=st.data(), which=st.integers(0, 1), seed=st.integers(0, 99), spread=st.sampled_from((1.0, 1e3, 1e6)))
    def write(self, data: st.DataObject, which: int, seed: int, spread: float) -> None:
        twin = self.twins[which]
        layer = data.draw(st.sampled_from(twin.layers), "layer")
        slots = data.draw(st.lists(st.integers(0, twin.end - 1), unique=True, max_size=6), "slots")
        names = data.draw(st.sampled_from(writable(twin.layout.layer_kinds[layer])), "planes")
        dtype = data.draw(st.sampled_from(INPUT_DTYPES), "dtype")
        generator = torch.Generator().manual_seed(seed)
        values = {
            name: (spread * torch.randn(len(slots), *twin.shape(name), generator=generator)).to(dtype) for name in names
        }
        kept = {name: tensor.clone() for name, tensor in values.items()}
        loc = data.draw(st.sampled_from(self.spellings(twin, slots)), "loc")
        call(twin.pool, layer, loc, values)
        for name, tensor in values.items():
            assert torch.equal(tensor, kept[name])
            for slot, row in zip(slots, tensor.float().flatten(1).tolist(), strict=True):
                twin.put(layer, name, slot, row)

    def spellings(self, twin: Twin, slots: list[int]) -> list[Tensor | SlotIds]:
        """The slots unchecked, checked by this pool, and checked by the other one where it has them."""
        loc = torch.tensor(slots, dtype=torch.int64)
        other = self.twins[1] if twin is self.twins[0] else self.twins[0]
        foreign = [other.pool.check_loc(loc)] if all(slot < other.end for slot in slots) else []
        return [loc, twin.pool.check_loc(loc), *foreign]

    @rule(data=st.data(), which=st.integers(0, 1))
    def copy_pages(self, data: st.DataObject, which: int) -> None:
        twin = self.twins[which]
        size = twin.layout.page_size
        source, target = draw_pairs(data, 1, twin.pool.num_pages)
        twin.pool.copy_pages(source, torch.tensor(target, dtype=torch.int64))
        pairs = zip(source, target, strict=True)
        twin.copy([(a * size + offset, b * size + offset) for a, b in pairs for offset in range(size)])

    @rule(data=st.data(), which=st.integers(0, 1))
    def copy_slots(self, data: st.DataObject, which: int) -> None:
        twin = self.twins[which]
        source, target = draw_pairs(data, twin.layout.page_size, twin.end - 1)
        twin.pool.copy_slots(torch.tensor(source, dtype=torch.int64), torch.tensor(target, dtype=torch.int64))
        twin.copy(list(zip(source, target, strict=True)))

    @rule(data=st.data(), which=st.integers(0, 1))
    def export_pages(self, data: st.DataObject, which: int) -> None:
        twin = self.twins[which]
        pages = data.draw(st.lists(st.integers(1, twin.pool.num_pages), max_size=3), "pages")
        self.blobs.append((twin.pool.export_pages(pages), pages, dict(twin.cells)))

    @precondition(lambda self: self.blobs)
    @rule(data=st.data(), which=st.integers(0, 1))
    def import_pages(self, data: st.DataObject, which: int) -> None:
        twin = self.twins[which]
        blob, pages, cells = data.draw(st.sampled_from(self.blobs), "blob")
        ids = st.integers(1, twin.pool.num_pages)
        targets = data.draw(st.lists(ids, unique=True, max_size=3), "targets")
        layers = data.draw(st.one_of(st.none(), st.lists(st.sampled_from(twin.layers), unique=True)), "layers")
        if len(targets) != len(pages):
            with pytest.raises(ValueError, match=rf"^the blob holds {len(pages)} pages, {len(targets)} were named"):
                twin.pool.import_pages(targets, blob, layers)
            return
        twin.pool.import_pages(targets, blob, layers)
        size = twin.layout.page_size
        for layer, name in twin.planes():
            for source, target in zip(pages, targets, strict=True) if layers is None or layer in layers else ():
                for offset in range(size):
                    cell = cells[layer, name, source * size + offset]
                    twin.cells[layer, name, target * size + offset] = cell

    @rule(data=st.data(), which=st.integers(0, 1))
    def refuse_a_bad_layer(self, data: st.DataObject, which: int) -> None:
        twin = self.twins[which]
        kinds = twin.layout.layer_kinds
        bad: list[object] = [*range(-len(kinds) - 1, len(kinds) + 2), True, 1.0, "0", None]
        layer = data.draw(st.sampled_from(bad), "layer")
        one = {name: torch.ones(1, *twin.shape(name)) for name in NAMES[SPARSE_KV]}
        name = data.draw(st.sampled_from(sorted(calls(twin.pool, layer, one))), "method")
        expected = layer_error(name, layer, twin)
        if expected is not None:
            with pytest.raises(expected):
                calls(twin.pool, layer, one)[name]()

    @rule(data=st.data(), which=st.integers(0, 1))
    def refuse_bad_slots(self, data: st.DataObject, which: int) -> None:
        twin = self.twins[which]
        outside = st.one_of(
            st.integers(-50, -1), st.integers(twin.end, twin.end + 50), st.sampled_from((2**62, -(2**63)))
        )
        slots = data.draw(st.lists(st.integers(0, twin.end - 1), max_size=3)) + [data.draw(outside)]
        loc = torch.tensor(data.draw(st.permutations(slots)), dtype=torch.int64)
        layer = data.draw(st.sampled_from(twin.layers), "layer")
        names = data.draw(st.sampled_from(writable(twin.layout.layer_kinds[layer])), "planes")
        values = {name: torch.ones(len(slots), *twin.shape(name)) for name in names}
        for bad in (loc, loc.int(), loc.float(), loc[None]):
            with pytest.raises(SlotError):
                call(twin.pool, layer, bad, values)
        with pytest.raises(SlotError):
            twin.pool.copy_slots(loc, loc)

    @rule(data=st.data(), which=st.integers(0, 1))
    def refuse_bad_tensors(self, data: st.DataObject, which: int) -> None:
        twin = self.twins[which]
        layer = data.draw(st.sampled_from(twin.layers), "layer")
        names = data.draw(st.sampled_from(writable(twin.layout.layer_kinds[layer])), "planes")
        good = {name: torch.ones(2, *twin.shape(name)) for name in names}
        name = data.draw(st.sampled_from(names), "plane")
        tensor = good[name]
        for bad in (tensor[:1], torch.cat([tensor, tensor], -1), tensor[0], tensor.long(), tensor.to("meta")):
            with pytest.raises(PlaneError, match=rf"^{name} "):
                call(twin.pool, layer, torch.tensor([0, 1]), {**good, name: bad})

    @rule(data=st.data(), which=st.integers(0, 1))
    def refuse_bad_pages(self, data: st.DataObject, which: int) -> None:
        pool = self.twins[which].pool
        page = data.draw(st.sampled_from((-1, 0, pool.num_pages + 1)), "page")
        for act in (
            lambda: pool.copy_pages([1, page], [1, 2]),
            lambda: pool.copy_pages([1, 2], [1, page]),
            lambda: pool.export_pages([1, page]),
            lambda: pool.import_pages([page], pool.export_pages([1])),
        ):
            with pytest.raises(ForeignPageError):
                act()
        with pytest.raises(PageError):
            pool.copy_pages([1, 2], [1, 1])


def writable(kind: LayerKind) -> list[tuple[str, ...]]:
    """The sets of planes that one setter writes, for a layer of this kind."""
    return [("k", "v")] + ([] if kind is DENSE else [NAMES[kind][2:], NAMES[kind]])


def call(pool: SparseKVPool, layer: int, loc: Tensor | SlotIds, values: dict[str, Tensor]) -> None:
    """The setter that writes these planes."""
    if "k" in values and "index_k" in values:
        pool.set_fused_kv_index_buffer(layer, loc, **values)
    elif "k" in values:
        pool.set_kv_buffer(layer, loc, **values)
    elif "index_v" in values:
        pool.set_index_kv_buffer(layer, loc, **values)
    else:
        pool.set_index_k_buffer(layer, loc, **values)


def draw_pairs(data: st.DataObject, least: int, most: int) -> tuple[list[int], list[int]]:
    target = data.draw(st.lists(st.integers(least, most), unique=True, max_size=4), "dst")
    source = data.draw(st.lists(st.integers(least, most), min_size=len(target), max_size=len(target)), "src")
    return source, target


def calls(pool: SparseKVPool, layer: object, one: dict[str, Tensor]) -> dict[str, Callable[[], object]]:
    """Every method that takes a layer id, on slot 0."""
    loc = torch.tensor([0])
    k, v, index_k, index_v = one.values()
    arguments: dict[str, tuple[object, ...]] = {
        "get_key_buffer": (),
        "get_value_buffer": (),
        "get_kv_buffer": (),
        "get_index_k_buffer": (),
        "get_index_kv_buffer": (),
        "make_resident": (torch.zeros(1),),
        "set_kv_buffer": (loc, k, v),
        "set_index_k_buffer": (loc, index_k),
        "set_index_kv_buffer": (loc, index_k, index_v),
        "set_fused_kv_index_buffer": (loc, k, v, index_k),
        "set_fused_kv_index_buffer with index_v": (loc, k, v, index_k, index_v),
    }
    return {name: partial(getattr(pool, name.split()[0]), layer, *given) for name, given in arguments.items()}


def layer_error(method: str, layer: object, twin: Twin) -> type[Exception] | None:
    """The error that is documented for this method and layer; None: it is a right one."""
    if type(layer) is not int:
        return NotALayerIdError
    if layer not in twin.layers:
        return LayerNotLocalError
    kind = twin.layout.layer_kinds[layer]
    if kind is DENSE and ("fused" in method or method in ("get_index_k_buffer", "make_resident")):
        return NotSparseLayerError
    if kind is not SPARSE_KV and method.endswith(("_index_kv_buffer", "index_v")):
        return NoIndexValueError
    if kind is not SPARSE_K and method in ("set_index_k_buffer", "set_fused_kv_index_buffer"):
        return NotKeyOnlyLayerError
    return None


PoolMachine.TestCase.settings = settings(
    max_examples=250,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestPool = PoolMachine.TestCase
