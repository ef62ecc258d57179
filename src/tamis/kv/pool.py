"""The sparse KV pool: one memory for every kind of layer, addressed by one slot id.

Inside are three sub-pools, groups of planes that are cut from one allocation: main K and V of every local layer, index
K and V of the K+V layers, index K of the K-only layers. They are private, because a caller that reached into one would
skip the layer check and the wait for the layer's load.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from tamis.config import LayerKind
from tamis.errors import (
    BlobMismatchError,
    ConfigError,
    NoIndexValueError,
    NotALayerIdError,
    NotKeyOnlyLayerError,
    NotSparseLayerError,
    PageError,
    SlotError,
)
from tamis.kernels.ops import LayerPlanes
from tamis.kernels.paging import cast_values, plane_rows, raw_view
from tamis.kv.blob import PageBlob
from tamis.kv.layout import INDEX_K_PLANES, INDEX_KV_PLANES, MAIN_PLANES, KVLayout, check_int
from tamis.kv.planes import Plane, PlaneMemory
from tamis.kv.slots import SlotIds, as_tuple, check_pages, check_rows, check_slots, check_unique_slots
from tamis.kv.transfer import INDEX, MAIN, LayerPart, LayerTransferCounter, part_of

logger = logging.getLogger(__name__)


class SparseKVPool:
    """Paged K, V, index K and index V of the layers of one pipeline stage.

    A slot is page * page_size + offset and means the same token in every plane of every layer. Buffers are
    `[num_pages + 1, heads, page_size, dim]` (index planes: one head). Pages 1 to num_pages are usable; page 0 is
    padding, which nobody owns and padding rows may write to.

    Every method checks all of its arguments before it writes anything. Layer ids are global; a bad one raises a
    LayerError, a bad `loc` SlotError, a bad tensor PlaneError. Readers wait for the layer's load and raise
    TransferError where it failed (`register_layer_transfer_counter`).
    """

    def __init__(self, layout: KVLayout, num_pages: int, device: str | torch.device = "cpu") -> None:
        """Zeroed buffers for `num_pages` usable pages. Raises ConfigError where they cannot be had.

        On a CPU they take physical memory page by page, as they are first used.
        """
        if not isinstance(layout, KVLayout):
            raise ConfigError(f"layout={layout!r} is not a KVLayout")
        check_int("num_pages", num_pages, 1)
        self.layout = layout
        self.num_pages = num_pages
        self._identity = object()
        self._counter: LayerTransferCounter | None = None
        self._memory = _allocate(layout, num_pages, device)
        self.device = self._memory.planes[layout.start_layer]["k"].buffer.device
        self._heads = tuple({plane.row[0] for planes in self._memory.planes.values() for plane in planes.values()})
        logger.info(
            "KV pool of %d pages of %d tokens on %s; layers: dense %s, index K %s, index K+V %s",
            num_pages, layout.page_size, self.device,
            list(layout.dense_layers), list(layout.index_k_layers), list(layout.index_kv_layers),
        )  # fmt: skip

    # Reading

    def get_key_buffer(self, layer_id: int) -> Tensor:
        """Main K of a layer, [num_pages + 1, kv_heads, page_size, head_dim], a view in the storage type."""
        return self.get_kv_buffer(layer_id)[0]

    def get_value_buffer(self, layer_id: int) -> Tensor:
        """Main V of a layer, as `get_key_buffer`."""
        return self.get_kv_buffer(layer_id)[1]

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """Main K and V of a layer, as `get_key_buffer`."""
        self.layout.kind(layer_id)
        self._wait(layer_id, MAIN)
        return self._view(layer_id, "k"), self._view(layer_id, "v")

    def get_index_k_buffer(self, layer_id: int) -> Tensor:
        """Index K of a sparse layer, [num_pages + 1, 1, page_size, index_head_dim], a view in the storage type.

        Raises NotSparseLayerError on a dense layer.
        """
        self._check_sparse(layer_id)
        self._wait(layer_id, INDEX)
        return self._view(layer_id, "index_k")

    def get_index_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """Index K and V of a K+V layer, as `get_index_k_buffer`. Raises NoIndexValueError on any other layer."""
        self._check_index_value(layer_id)
        self._wait(layer_id, INDEX)
        return self._view(layer_id, "index_k"), self._view(layer_id, "index_v")

    @property
    def is_loading(self) -> bool:
        """Whether a read may have to wait for a load."""
        return self._counter is not None and self._counter.is_consuming

    @property
    def all_resident(self) -> bool:
        """Whether all main K and V live in this pool, so that picks need not pass through `make_resident`."""
        return True

    def make_resident(self, layer_id: int, picks: Tensor) -> Tensor:
        """Have the picked blocks' main K and V of a sparse layer in this pool; the picks under which they are found.

        All of main K and V live here today, so that the picks come back as they are. Raises NotSparseLayerError on a
        dense layer.
        """
        self._check_sparse(layer_id)
        return picks

    def open_layer(self, layer_id: int, loc: Tensor | SlotIds) -> LayerPlanes:
        """The planes of a layer for kernels that write a step's tokens and read the context in one pass.

        Checks and waits as the setters and getters do. Raises NotKeyOnlyLayerError on a K+V layer.
        """
        kind, slots = self.layout.kind(layer_id), self.check_loc(loc)
        planes = self._memory.planes[layer_id]
        dense = kind is LayerKind.DENSE
        if not dense:
            self._check_key_only(layer_id)
        self._wait(layer_id, MAIN if dense else MAIN | INDEX)
        return LayerPlanes(
            self._view(layer_id, "k"), self._view(layer_id, "v"), None if dense else self._view(layer_id, "index_k"),
            slots.rows(planes["k"].row[0]), None if dense else slots.rows(1),
            all(plane.scale == 1.0 for plane in planes.values()),
        )  # fmt: skip

    # Writing

    def check_loc(self, loc: Tensor | SlotIds) -> SlotIds:
        """Check slots, int64 [n], once a step: 0 <= slot < (num_pages + 1) * page_size, else SlotError.

        Slots of page 0 (padding) and slots named twice are allowed; which row a slot named twice keeps is not defined.
        """
        if isinstance(loc, SlotIds):
            if loc.is_checked_by(self._identity):
                return loc
            loc = loc.slots
        return self._slot_ids(check_slots(loc, 0, (self.num_pages + 1) * self.layout.page_size))

    def set_kv_buffer(self, layer_id: int, loc: Tensor | SlotIds, k: Tensor, v: Tensor) -> None:
        """Write main K and V of n tokens: k, v [n, kv_heads, head_dim]."""
        self.layout.kind(layer_id)
        self._write(layer_id, loc, {"k": k, "v": v})

    def set_index_k_buffer(self, layer_id: int, loc: Tensor | SlotIds, index_k: Tensor) -> None:
        """Write index K of n tokens, [n, 1, index_head_dim]. Raises NotKeyOnlyLayerError unless the layer is K-only."""
        self._check_key_only(layer_id)
        self._write(layer_id, loc, {"index_k": index_k})

    def set_index_kv_buffer(self, layer_id: int, loc: Tensor | SlotIds, index_k: Tensor, index_v: Tensor) -> None:
        """Write index K and V of n tokens, [n, 1, index_head_dim]. Raises NoIndexValueError unless the layer is K+V."""
        self._check_index_value(layer_id)
        self._write(layer_id, loc, {"index_k": index_k, "index_v": index_v})

    def set_fused_kv_index_buffer(
        self, layer_id: int, loc: Tensor | SlotIds, k: Tensor, v: Tensor, index_k: Tensor, index_v: Tensor | None = None
    ) -> None:
        """Write all planes of n tokens of a sparse layer at once; `index_v` exactly where the layer has that plane.

        Raises NotSparseLayerError on a dense layer, NoIndexValueError for an `index_v` on a K-only layer,
        NotKeyOnlyLayerError for none on a K+V layer.
        """
        self._check_sparse(layer_id)
        rows = {"k": k, "v": v, "index_k": index_k}
        if index_v is None:
            self._check_key_only(layer_id)
        else:
            self._check_index_value(layer_id)
            rows["index_v"] = index_v
        self._write(layer_id, loc, rows)

    # Moving

    def register_layer_transfer_counter(self, counter: LayerTransferCounter | None) -> None:
        """Have every later read wait for the loads that `counter` was told of; None: no read waits.

        Raises ConfigError unless it is a counter with as many layers as this stage.
        """
        layers = len(self.layout.local_layers)
        if counter is not None and not isinstance(counter, LayerTransferCounter):
            raise ConfigError(f"counter={counter!r} is not a LayerTransferCounter")
        if counter is not None and counter.num_layers != layers:
            raise ConfigError(f"the transfer counter has {counter.num_layers} layers, this pipeline stage {layers}")
        self._counter = counter

    def copy_pages(self, src: Sequence[int] | Tensor, dst: Sequence[int] | Tensor) -> None:
        """Copy whole pages, src[i] to dst[i], in every plane, as if all at once.

        Raises PageError where the lengths differ or a destination is named twice, ForeignPageError for a bad id.
        """
        sources = check_pages(src, self.num_pages)
        targets = check_pages(dst, self.num_pages, unique=True)
        if len(sources) != len(targets):
            raise PageError(f"{len(sources)} source pages cannot be copied to {len(targets)} pages")
        self._wait_for_all(self.layout.local_layers)
        read, write = self._page_ids(sources), self._page_ids(targets)
        for _, plane in self._planes(self.layout.local_layers):
            plane.raw.index_copy_(0, write, plane.raw.index_select(0, read))

    def copy_slots(self, src: Tensor, dst: Tensor) -> None:
        """Copy single tokens, slot src[i] to dst[i], int64 [n] each, in every plane, as if all at once.

        Raises SlotError where the lengths differ, a destination is named twice, or a slot is not in a usable page.
        """
        first, end = self.layout.page_size, (self.num_pages + 1) * self.layout.page_size
        read = self._slot_ids(check_slots(src, first, end, "src"))
        write = self._slot_ids(check_slots(dst, first, end, "dst"))
        if len(read) != len(write):
            raise SlotError(f"{len(read)} source slots cannot be copied to {len(write)} slots")
        check_unique_slots(write.slots, "dst")
        self._wait_for_all(self.layout.local_layers)
        for _, plane in self._planes(self.layout.local_layers):
            heads = plane.row[0]
            plane.rows.index_put_((write.rows(heads),), plane.rows[read.rows(heads)])

    def export_pages(self, pages: Sequence[int] | Tensor, *, wait: bool = True) -> PageBlob:
        """A copy of these pages, every plane of every local layer. Raises PageError for a bad id.

        Without `wait` for pages that no load writes to: the loads of the step that is being computed are not theirs.
        """
        ids = self._page_ids(check_pages(pages, self.num_pages))
        if wait:
            self._wait_for_all(self.layout.local_layers)
        planes = self._planes(self.layout.local_layers)
        tensors = {(layer, plane.name): plane.raw.index_select(0, ids) for layer, plane in planes}
        return PageBlob(self.layout, len(ids), MappingProxyType(tensors))

    def import_pages(
        self,
        pages: Sequence[int] | Tensor,
        blob: PageBlob,
        layers: Sequence[int] | None = None,
        parts: LayerPart = MAIN | INDEX,
    ) -> None:
        """Put a blob's pages into these pages, for the given local layers (None: all) and parts of them.

        Does not wait: loaders use it.

        Raises BlobMismatchError where the blob was made under another layout, holds another number of pages, or lacks
        a tensor or has one that cannot be copied; PageError for a bad page id, LayerError for a bad layer id.
        """
        if not isinstance(blob, PageBlob):
            raise BlobMismatchError(f"the blob is of type {type(blob).__name__}, a PageBlob is needed")
        targets = check_pages(pages, self.num_pages, unique=True)
        wanted = self.layout.local_layers if layers is None else as_tuple("layers", layers, NotALayerIdError)
        for layer in wanted:
            self.layout.kind(layer)
        planes = [(layer, plane) for layer, plane in self._planes(wanted) if part_of(plane.name) in parts]
        blob.check(self.layout, len(targets), [(layer, plane.name) for layer, plane in planes])
        ids = self._page_ids(targets)
        tensors = {(layer, plane.name): blob.tensors[layer, plane.name].detach() for layer, plane in planes}
        # A tensor may be a view of this pool: it must be read before any plane is written.
        tensors = {key: tensor.clone() if self._memory.holds(tensor) else tensor for key, tensor in tensors.items()}
        for layer, plane in planes:
            plane.raw.index_copy_(0, ids, tensors[layer, plane.name].to(self.device))

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Bytes allocated: "main", "index_k", "index_kv" of usable pages, "padding" (page 0 in all planes), "total"."""
        layout, nbytes = self.layout, self._memory.nbytes
        whole = {
            "main": nbytes(layout.local_layers, MAIN_PLANES),
            "index_k": nbytes(layout.index_k_layers, INDEX_K_PLANES),
            "index_kv": nbytes(layout.index_kv_layers, INDEX_KV_PLANES),
        }
        usable = {name: size // (self.num_pages + 1) * self.num_pages for name, size in whole.items()}
        total = sum(whole.values())
        return {**usable, "padding": total - sum(usable.values()), "total": total}

    # Checks: all raise LayerError with the layer ids that would have been right

    def _check_sparse(self, layer_id: int) -> None:
        if self.layout.kind(layer_id) is LayerKind.DENSE:
            raise NotSparseLayerError(
                f"layer_id={layer_id} is not a sparse attention layer; sparse layers: {list(self.layout.sparse_layers)}"
            )

    def _check_key_only(self, layer_id: int) -> None:
        if self.layout.kind(layer_id) is not LayerKind.SPARSE_K:
            raise NotKeyOnlyLayerError(
                f"layer_id={layer_id} is not in the K-only sparse group. "
                f"K-only layers: {list(self.layout.index_k_layers)}"
            )

    def _check_index_value(self, layer_id: int) -> None:
        if self.layout.kind(layer_id) is not LayerKind.SPARSE_KV:
            raise NoIndexValueError(
                f"layer_id={layer_id} does not have an index V cache (either dense, or in the K-only group). "
                f"index_kv layers: {list(self.layout.index_kv_layers)}"
            )

    # The layer's id has been checked by whoever calls these

    def _view(self, layer_id: int, name: str) -> Tensor:
        """A plane in its own type; a tensor of the caller's own, so that what is done to the object stays there."""
        return self._memory.planes[layer_id][name].buffer.detach()

    def _planes(self, layers: Iterable[int]) -> Iterator[tuple[int, Plane]]:
        for layer in layers:
            for plane in self._memory.planes[layer].values():
                yield layer, plane

    def _wait(self, layer_id: int, part: LayerPart) -> None:
        if self._counter is not None:
            self._counter.wait_until(self.layout.local_index(layer_id), part)

    def _wait_for_all(self, layers: Sequence[int]) -> None:
        for layer in layers:
            dense = self.layout.layer_kinds[layer] is LayerKind.DENSE
            self._wait(layer, MAIN if dense else MAIN | INDEX)

    def _slot_ids(self, checked: Tensor) -> SlotIds:
        slots = checked.to(self.device)
        page_size = self.layout.page_size
        return SlotIds(slots, {heads: plane_rows(slots, heads, page_size) for heads in self._heads}, self._identity)

    def _page_ids(self, checked: list[int]) -> Tensor:
        return torch.tensor(checked, dtype=torch.int64, device=self.device)

    def _write(self, layer_id: int, loc: Tensor | SlotIds, rows: dict[str, Tensor]) -> None:
        """Check slots and every tensor, cast them all, then write them all: one may be a view of another's plane."""
        slots = self.check_loc(loc)
        planes = self._memory.planes[layer_id]
        for name, values in rows.items():
            check_rows(name, values, (len(slots), *planes[name].row), self.device)
        stored = [self._stored(planes[name], values) for name, values in rows.items()]
        for name, values in zip(rows, stored, strict=True):
            plane = planes[name]
            plane.rows.index_put_((slots.rows(plane.row[0]),), values)

    def _stored(self, plane: Plane, values: Tensor) -> Tensor:
        """Rows as the plane keeps them, in memory of their own or the caller's."""
        values = raw_view(cast_values(values, plane.buffer.dtype, plane.scale))
        return values.clone() if self._memory.holds(values) else values


def _allocate(layout: KVLayout, num_pages: int, device: str | torch.device) -> PlaneMemory:
    """Memory for `num_pages` and the padding page. Raises ConfigError naming the bytes and the device."""
    size = (num_pages + 1) * layout.bytes_per_page
    try:
        place = torch.device(device)
        # Buffers made inside a caller's inference_mode could not be written outside of it.
        with torch.inference_mode(False):
            return PlaneMemory(layout, num_pages + 1, place)
    # torch: unknown or absent device, out of memory, numbers past 64 bits; numpy: out of memory, array too large
    except (RuntimeError, AssertionError, TypeError, MemoryError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"a KV pool of {size} bytes cannot be made on device={str(device)!r}: {reason}") from error
