"""Pages taken out of a pool: raw bytes of every plane, and the layout they were made under."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from tamis.errors import BlobMismatchError
from tamis.kernels.paging import storage_dtype
from tamis.kv.layout import KVLayout
from tamis.kv.slots import check_tensor


@dataclass(frozen=True, eq=False)
class PageBlob:
    """Pages in memory, as stored: no value is converted on the way out or in."""

    layout: KVLayout
    """Of the pool that the pages came from."""
    num_pages: int
    tensors: Mapping[tuple[int, str], Tensor]
    """(global layer id, "k" | "v" | "index_k" | "index_v") -> [num_pages, heads, page_size, dim], fp8 as uint8."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def page(self, place: int) -> "PageBlob":
        """One page of it, a view."""
        tensors = {name: tensor[place : place + 1] for name, tensor in self.tensors.items()}
        return PageBlob(self.layout, 1, tensors)

    def check(self, layout: KVLayout, num_pages: int, planes: Iterable[tuple[int, str]]) -> None:
        """Raise BlobMismatchError unless these planes (global layer id, name) are `num_pages` pages of `layout`.

        A layout differs where any field does, scales included: the same bytes would then mean other values, or lie
        at other places. The tensors are checked too, since a blob may have been through a file.
        """
        if not isinstance(self.layout, KVLayout) or not isinstance(self.tensors, Mapping):
            raise BlobMismatchError("the blob has no KVLayout or no mapping of tensors")
        for name, mine, pools in self.layout.differences(layout):
            raise BlobMismatchError(f"the blob was made under {name}={mine}, this pool has {name}={pools}")
        if self.num_pages != num_pages:
            raise BlobMismatchError(f"the blob holds {self.num_pages} pages, {num_pages} were named to take them")
        for layer, plane in planes:
            self._check_tensor(layer, plane)

    def _check_tensor(self, layer: int, plane: str) -> None:
        tensor = self.tensors.get((layer, plane))
        if tensor is None:
            raise BlobMismatchError(f"the blob has no {plane} of layer_id={layer}")
        check_tensor(f"the blob's {plane} of layer_id={layer}", tensor, BlobMismatchError)
        heads, dim = self.layout.row_shape(plane)
        shape = [self.num_pages, heads, self.layout.page_size, dim]
        dtype = storage_dtype(self.layout.plane_dtype(plane))
        if list(tensor.shape) != shape or tensor.dtype != dtype:
            raise BlobMismatchError(
                f"the blob's {plane} of layer_id={layer} is {tensor.dtype} {list(tensor.shape)}, not {dtype} {shape}"
            )
