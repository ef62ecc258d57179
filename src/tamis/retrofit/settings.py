"""What a retrofit run is asked for: all that its result depends on beside the base model and the texts."""

from dataclasses import asdict, dataclass
from typing import Any

from tamis.config import ModelConfig
from tamis.errors import ConfigError
from tamis.kv.layout import check_int

MIN_CONTEXT = 64
"""Tokens of a training window at least."""


@dataclass(frozen=True)
class RetrofitSettings:
    """Options of `tamis retrofit`; `resolve` fills in what depends on the base."""

    context: int = 0
    """Tokens a training window; 0: the model's context, at most 8,192."""
    windows: int = 24
    """Windows to train on."""
    steps_per_window: int = 8
    """Steps from each, with other queries: a teacher's pass costs more than they do."""
    queries: int = 128
    """Queries sampled for a step, in each layer."""
    learning_rate: float = 0.2
    """Of the index projections at the start; it falls along a cosine."""
    value_rate: float = 1e-3
    """Of the index value, the same way."""
    token_share: float = 0.4
    """Share of the steps that learn from all tokens, before the rest learns from blocks."""
    index_head_dim: int = 0
    """0: the model's own head dim."""
    budget: int = 512
    """Tokens that a query attends to in a sparse layer, forced blocks included."""
    block_sizes: tuple[int, ...] = (8,)
    """Block sizes to choose from by what each loses at this budget."""
    init_blocks: int = 1
    local_blocks: int = 1
    dense_layers: tuple[int, ...] | None = None
    """Layers that stay dense; None: the `dense_budget` ones that lose most."""
    dense_budget: int | None = None
    """None: two layers in fifteen."""
    index_value: bool = False
    """Train K+V layers: an index value whose output repairs what block selection loses."""
    written_share: float = 0.08
    """Share of the windows that hold text the model wrote itself."""
    patience: int = 0
    """Stop after so many windows without a better captured mass; 0: train on all windows."""
    seed: int = 0

    def resolve(self, config: ModelConfig) -> "RetrofitSettings":
        """These settings for a base model. Raises ConfigError for what cannot be trained."""
        values = asdict(self)
        values["context"] = self.context or min(config.context_length, 8192)
        values["index_head_dim"] = self.index_head_dim or config.head_dim
        values["dense_budget"] = 2 * config.num_layers // 15 if self.dense_budget is None else self.dense_budget
        resolved = RetrofitSettings(**values)
        resolved.check(config)
        return resolved

    def check(self, config: ModelConfig) -> None:
        """Raise ConfigError, naming the setting and its value, for what makes no sense for the base model."""
        if not MIN_CONTEXT <= self.context <= config.context_length:
            raise ConfigError(
                f"context={self.context} is not between {MIN_CONTEXT} and the model's {config.context_length}"
            )
        if self.index_head_dim < config.rope.rotary_dim:
            raise ConfigError(f"index_head_dim={self.index_head_dim} is less than rotary_dim={config.rope.rotary_dim}")
        for name, least in (
            ("windows", 1),
            ("steps_per_window", 1),
            ("queries", 8),
            ("budget", 1),
            ("patience", 0),
        ):
            check_int(name, getattr(self, name), least)
        for name in ("learning_rate", "value_rate"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)} is not above 0 and at most 1")
        for name in ("token_share", "written_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)} is not between 0 and 1")
        self._check_blocks()
        self._check_layers(config.num_layers)

    def _check_blocks(self) -> None:
        forced = self.init_blocks + self.local_blocks
        if not self.block_sizes or self.init_blocks < 0 or self.local_blocks < 1:
            raise ConfigError(f"block_sizes={list(self.block_sizes)} with {forced} forced blocks cannot be trained")
        for size in self.block_sizes:
            if size < 1 or self.budget % size:
                raise ConfigError(f"budget={self.budget} is no multiple of block_size={size}")
            if self.budget // size <= forced:
                raise ConfigError(
                    f"budget={self.budget} leaves no block of {size} to choose beside {forced} forced ones"
                )
        if self.budget >= self.context:
            raise ConfigError(f"budget={self.budget} is not below context={self.context}: nothing would be left out")

    def _check_layers(self, layers: int) -> None:
        wrong = [layer for layer in self.dense_layers or () if not 0 <= layer < layers]
        if wrong:
            raise ConfigError(f"dense_layers: there is no layer {wrong[0]}; layers are 0 to {layers - 1}")
        check_int("dense_budget", self.dense_budget or 0, 0)
        dense = self.dense_budget or 0 if self.dense_layers is None else len(set(self.dense_layers))
        if dense >= layers:
            raise ConfigError(f"{dense} dense layers of {layers} leave none to train")

    def plan(self) -> dict[str, Any]:
        """What learning depends on: a run that differs in nothing else can go on from what another has learned."""
        return {key: value for key, value in self.record().items() if key != "dense_budget"}

    def record(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}
