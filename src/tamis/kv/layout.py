"""What the pool keeps for each layer, and every byte of it: layer groups, pipeline window, storage types, scales."""

import hashlib
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from tamis.config import KV_DTYPES, LayerKind, ModelConfig, ParallelContext
from tamis.errors import ConfigError, LayerNotLocalError, NotALayerIdError
from tamis.kernels.paging import FP8_DTYPES

MAIN_PLANES = ("k", "v")
INDEX_KV_PLANES = ("index_k", "index_v")
INDEX_K_PLANES = ("index_k",)


def check_int(name: str, value: object, least: int) -> None:
    """Raise ConfigError unless `value` is an int (no bool) of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}={value!r} must be a whole number of at least {least}")


@dataclass(frozen=True)
class LayerScales:
    """Constants of one layer: a value is divided by its plane's scale before the cast, and multiplied on read."""

    k: float = 1.0
    v: float = 1.0
    index_k: float = 1.0
    index_v: float = 1.0

    def __post_init__(self) -> None:
        for plane in MAIN_PLANES + INDEX_KV_PLANES:
            value = self.of(plane)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ConfigError(f"scale {plane}={value!r} must be a finite number above 0")

    def of(self, plane: str) -> float:
        """The scale of plane "k", "v", "index_k" or "index_v"."""
        scales = {"k": self.k, "v": self.v, "index_k": self.index_k, "index_v": self.index_v}
        return scales[plane]


UNIT_SCALES = LayerScales()


def split_layers(num_layers: int, stages: int) -> tuple[tuple[int, int], ...]:
    """Cut `num_layers` into `stages` pipeline windows (start, end), start <= id < end.

    Stage i starts at floor(i * num_layers / stages): every layer is in exactly one window, none is empty. Raises
    ConfigError where there are more stages than layers.
    """
    check_int("num_layers", num_layers, 1)
    check_int("stages", stages, 1)
    if stages > num_layers:
        raise ConfigError(f"{num_layers} layers cannot be split over {stages} pipeline stages: some would be empty")
    bounds = [stage * num_layers // stages for stage in range(stages + 1)]
    return tuple(itertools.pairwise(bounds))


@dataclass(frozen=True)
class KVLayout:
    """What one rank of one pipeline stage keeps for a token. Layer ids are global; raises ConfigError on bad fields."""

    layer_kinds: tuple[LayerKind, ...]
    """The whole model, by global layer id."""
    kv_heads: int
    """KV heads of this rank."""
    head_dim: int
    index_head_dim: int = 0
    """Size of an index key (and value); at least 1 where the model has sparse layers."""
    page_size: int = 32
    """Tokens a page."""
    dtype: torch.dtype = torch.bfloat16
    """Storage of main K and V: fp32, bf16, fp16, float8_e4m3fn or float8_e5m2."""
    index_dtype: torch.dtype | None = None
    """Storage of the index planes; None: `dtype`, or bf16 when `dtype` is fp8."""
    start_layer: int = 0
    """This pipeline stage owns layers start_layer <= id < end_layer."""
    end_layer: int | None = None
    """None: the number of layers."""
    kv_head_offset: int = 0
    """First global KV head of this rank."""
    scales: tuple[LayerScales, ...] | None = None
    """Constants of every layer of the whole model, by global id, whatever the storage type; None: all 1."""

    def __post_init__(self) -> None:
        kinds = self.layer_kinds
        if not isinstance(kinds, tuple) or not kinds or not all(isinstance(kind, LayerKind) for kind in kinds):
            raise ConfigError(f"layer_kinds={kinds!r} must be a tuple of one LayerKind a layer")
        sparse = any(kind is not LayerKind.DENSE for kind in kinds)
        for name, least in (("kv_heads", 1), ("head_dim", 1), ("index_head_dim", 1 if sparse else 0),
                            ("page_size", 1), ("start_layer", 0), ("kv_head_offset", 0)):  # fmt: skip
            check_int(name, getattr(self, name), least)
        for name in ("dtype", "index_dtype"):
            value = getattr(self, name)
            if value not in KV_DTYPES.values() and not (name == "index_dtype" and value is None):
                raise ConfigError(f"{name}={value!r} is not one of {', '.join(map(str, KV_DTYPES.values()))}")
        if self.end_layer is not None:
            check_int("end_layer", self.end_layer, 0)
        if not self.start_layer < self.stop_layer <= len(kinds):
            raise ConfigError(
                f"pipeline stage {self.start_layer} <= id < {self.stop_layer} is not a range of the {len(kinds)} layers"
            )
        if self.scales is not None:
            self._check_scales(self.scales)

    def _check_scales(self, scales: tuple[LayerScales, ...]) -> None:
        if not isinstance(scales, tuple) or not all(isinstance(entry, LayerScales) for entry in scales):
            raise ConfigError(f"scales={scales!r} must be a tuple of one LayerScales a layer")
        if len(scales) != len(self.layer_kinds):
            raise ConfigError(f"scales has {len(scales)} entries for {len(self.layer_kinds)} layers")

    @classmethod
    def from_model(
        cls,
        config: ModelConfig,
        *,
        page_size: int,
        dtype: torch.dtype,
        index_dtype: torch.dtype | None = None,
        parallel: ParallelContext | None = None,
        scales: tuple[LayerScales, ...] | None = None,
    ) -> "KVLayout":
        """The layout of a model on one rank (facts.md section 4): KV heads are split, index planes are on every rank.

        Where there are more ranks than KV heads, neighbours hold the same head. Raises PageSizeError if `page_size`
        does not divide the sparse block, ConfigError if heads or layers cannot be split so.
        """
        place = ParallelContext() if parallel is None else parallel
        for name, rank, size in (("tp", place.tp_rank, place.tp_size), ("pp", place.pp_rank, place.pp_size)):
            if not 0 <= rank < size:
                raise ConfigError(f"{name}_rank={rank} is not below {name}_size={size}")
        if config.kv_heads % place.tp_size and place.tp_size % config.kv_heads:
            raise ConfigError(f"{config.kv_heads} KV heads cannot be split over {place.tp_size} ranks")
        if config.sparse is not None:
            config.sparse.check_page_size(page_size)
        start, end = split_layers(config.num_layers, place.pp_size)[place.pp_rank]
        return cls(
            layer_kinds=config.layer_kinds,
            kv_heads=max(1, config.kv_heads // place.tp_size),
            head_dim=config.head_dim,
            index_head_dim=0 if config.sparse is None else config.sparse.index_head_dim,
            page_size=page_size,
            dtype=dtype,
            index_dtype=index_dtype,
            start_layer=start,
            end_layer=end,
            kv_head_offset=place.tp_rank * config.kv_heads // place.tp_size,
            scales=scales,
        )

    @property
    def stop_layer(self) -> int:
        """`end_layer`, resolved: the first global id after this stage."""
        return len(self.layer_kinds) if self.end_layer is None else self.end_layer

    @property
    def index_storage(self) -> torch.dtype:
        """`index_dtype`, resolved: what the index planes are stored in."""
        if self.index_dtype is not None:
            return self.index_dtype
        return torch.bfloat16 if self.dtype in FP8_DTYPES else self.dtype

    @cached_property
    def local_layers(self) -> tuple[int, ...]:
        """Global ids of this stage."""
        return tuple(range(self.start_layer, self.stop_layer))

    def _local(self, *kinds: LayerKind) -> tuple[int, ...]:
        return tuple(layer for layer in self.local_layers if self.layer_kinds[layer] in kinds)

    @cached_property
    def dense_layers(self) -> tuple[int, ...]:
        """Global ids of this stage's layers without an index plane."""
        return self._local(LayerKind.DENSE)

    @cached_property
    def sparse_layers(self) -> tuple[int, ...]:
        """Global ids of this stage's layers with an index key."""
        return self._local(LayerKind.SPARSE_K, LayerKind.SPARSE_KV)

    @cached_property
    def index_kv_layers(self) -> tuple[int, ...]:
        """Global ids of this stage's layers with an index key and an index value."""
        return self._local(LayerKind.SPARSE_KV)

    @cached_property
    def index_k_layers(self) -> tuple[int, ...]:
        """Global ids of this stage's layers with an index key only."""
        return self._local(LayerKind.SPARSE_K)

    def local_index(self, layer_id: int) -> int:
        """Position of a global layer id in this stage, from 0.

        Raises NotALayerIdError unless it is an int (no bool), LayerNotLocalError outside the stage.
        """
        if isinstance(layer_id, bool) or not isinstance(layer_id, int):
            raise NotALayerIdError(f"layer_id={layer_id!r} is not a layer id: an int is needed, not {_type(layer_id)}")
        if not self.start_layer <= layer_id < self.stop_layer:
            raise LayerNotLocalError(
                f"layer_id={layer_id} is not on this pipeline stage, "
                f"which owns layers {self.start_layer} <= id < {self.stop_layer}"
            )
        return layer_id - self.start_layer

    def kind(self, layer_id: int) -> LayerKind:
        """The kind of a layer of this stage; raises as `local_index`."""
        self.local_index(layer_id)
        return self.layer_kinds[layer_id]

    def layer_scales(self, layer_id: int) -> LayerScales:
        """The constants of a layer of this stage; raises as `local_index`."""
        self.local_index(layer_id)
        return UNIT_SCALES if self.scales is None else self.scales[layer_id]

    def planes(self, layer_id: int) -> tuple[str, ...]:
        """Names of the planes a layer of this stage has, of "k", "v", "index_k", "index_v"; raises as `local_index`."""
        kind = self.kind(layer_id)
        if kind is LayerKind.DENSE:
            return MAIN_PLANES
        return MAIN_PLANES + (INDEX_K_PLANES if kind is LayerKind.SPARSE_K else INDEX_KV_PLANES)

    def row_shape(self, plane: str) -> tuple[int, int]:
        """(heads, dim) of one token in plane "k", "v", "index_k" or "index_v"."""
        return (self.kv_heads, self.head_dim) if plane in MAIN_PLANES else (1, self.index_head_dim)

    def plane_dtype(self, plane: str) -> torch.dtype:
        """Storage type of plane "k", "v", "index_k" or "index_v"."""
        return self.dtype if plane in MAIN_PLANES else self.index_storage

    @property
    def bytes_per_token(self) -> dict[str, int]:
        """Bytes a token takes here: "main", "index_k" (K-only layers), "index_kv", "total" (facts.md section 4)."""
        main = 2 * len(self.local_layers) * self.kv_heads * self.head_dim * self.dtype.itemsize
        index = self.index_head_dim * self.index_storage.itemsize
        index_k = len(self.index_k_layers) * index
        index_kv = 2 * len(self.index_kv_layers) * index
        return {"main": main, "index_k": index_k, "index_kv": index_kv, "total": main + index_k + index_kv}

    @property
    def bytes_per_page(self) -> int:
        """Bytes a page takes on this rank, over all planes."""
        return self.bytes_per_token["total"] * self.page_size

    def bytes_read(self, context: int, attended: int) -> int:
        """Bytes of this stage's planes that one token reads at a context of `context` tokens.

        Dense layers read all main K and V; sparse layers all index planes and the main K and V of `attended` tokens.
        """
        main = 2 * self.kv_heads * self.head_dim * self.dtype.itemsize
        kept = self.bytes_per_token
        tokens = len(self.dense_layers) * context + len(self.sparse_layers) * min(context, attended)
        return main * tokens + (kept["index_k"] + kept["index_kv"]) * context

    def pages_for(self, budget_bytes: int) -> int:
        """Usable pages that fit `budget_bytes`; the padding page is extra and not counted. 0 where none fits."""
        check_int("budget_bytes", budget_bytes, 0)
        return budget_bytes // self.bytes_per_page

    def differences(self, other: "KVLayout") -> Iterator[tuple[str, object, object]]:
        """Each field, resolved, in which pages of `self` and `other` differ: (name, mine, theirs)."""
        if self == other:
            return
        mine, theirs = self._resolved(), other._resolved()
        for name in (*mine, *(name for name in theirs if name not in mine)):
            if mine.get(name) != theirs.get(name):
                yield name, mine.get(name), theirs.get(name)

    def fingerprint(self) -> str:
        """A sha256 over every field, resolved: equal exactly where pages of one layout can be read under the other."""
        return hashlib.sha256(json.dumps(self._resolved()).encode()).hexdigest()

    def _resolved(self) -> dict[str, object]:
        fields: dict[str, object] = {
            "dtype": str(self.dtype),
            "index_dtype": str(self.index_storage),
            "page_size": self.page_size,
            "kv_heads": self.kv_heads,
            "kv_head_offset": self.kv_head_offset,
            "head_dim": self.head_dim,
            "index_head_dim": self.index_head_dim,
            "number of layers": len(self.layer_kinds),
            "start_layer": self.start_layer,
            "end_layer": self.stop_layer,
        }
        for layer, kind in enumerate(self.layer_kinds):
            fields[f"layer_kinds[{layer}]"] = kind.value
        for layer, scales in enumerate(self.scales or (UNIT_SCALES,) * len(self.layer_kinds)):
            for plane in MAIN_PLANES + INDEX_KV_PLANES:
                fields[f"scales[{layer}].{plane}"] = float(scales.of(plane))
        return fields


def _type(value: object) -> str:
    return type(value).__name__
