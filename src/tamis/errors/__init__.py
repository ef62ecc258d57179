"""Every error tamis raises on purpose.

TamisError
├── ConfigError (ValueError)                a model or engine configuration that cannot be run
│   ├── UnsupportedArchitectureError        config.json / GGUF names a model we do not implement
│   ├── UnsupportedRopeError                RoPE scaling we do not implement
│   └── PageSizeError                       page size that does not divide the sparse block
├── ModelNotFoundError (FileNotFoundError)  no such directory, file, or built-in name
├── DownloadError (RuntimeError)            fetching failed or the bytes are not the expected ones
├── WeightError (ValueError)                what is wrong with a weight file, naming tensor and file
│   ├── MissingTensorError
│   ├── UnexpectedTensorError
│   ├── TensorShapeError
│   ├── TensorDtypeError
│   ├── BaseMismatchError                  an index branch that was made for other weights
│   └── CorruptFileError                    truncated, or counts and offsets that lie
├── TokenizerError (ValueError)             tokenizer or chat template missing, unknown or failing
├── RequestError (ValueError)               a request that cannot be run, refused before any work
│   ├── SamplingError                       a sampling parameter out of its range
│   ├── GrammarError                        a schema or grammar that cannot be compiled or followed
│   ├── EmptyPromptError
│   ├── TokenRangeError                     token id outside the vocabulary
│   ├── PromptTooLongError                  prompt that leaves no room in the model's context
│   ├── NeverFitsError                      needs more pages than the whole pool has
│   └── SessionError                        a named session that cannot be saved
│       └── SessionNotFoundError            no session of this name, or no request of this id
├── LogitsError (RuntimeError)              the model gave logits that nothing can be sampled from
├── LayerError (ValueError)                 a layer id the pool or layout cannot serve
│   ├── NotALayerIdError (TypeError)        not an int
│   ├── LayerNotLocalError                  belongs to another pipeline stage
│   ├── NotSparseLayerError                 has no index plane
│   ├── NotKeyOnlyLayerError                is not in the K-only group
│   └── NoIndexValueError                   has no index value plane
├── SlotError (ValueError)                  a bad `loc`
├── PlaneError (ValueError)                 a tensor to write has the wrong shape, dtype or device
├── PageError (ValueError)                  a bad page id
│   ├── DoubleFreeError
│   └── ForeignPageError                    page 0, or a page this pool does not have
├── OutOfPagesError (RuntimeError)          not enough free pages
├── BlobMismatchError (ValueError)          exported pages that belong to another layout
├── TransferError (RuntimeError)            a layer load failed, was abandoned or timed out
├── TierError (RuntimeError)                a KV tier cannot do now what it was asked for: down, slow, out of room
│   └── TierReadError                       a page that a tier does not have, or not as it was written
├── KernelInputError (ValueError)           operands of a kernel do not fit together
├── KernelFailedError (RuntimeError)        a compiled kernel raised
├── QueueFullError (RuntimeError)           as many requests wait as may; try again later
├── EngineClosedError (RuntimeError)        used after close()
├── EngineDeadError (RuntimeError)          the engine's thread ended on an error; the message gives the reason
├── RemoteError (RuntimeError)              a server does not answer, or not as OpenAI's API says
└── CatalogError (ValueError)               error records, or a data set of them, that are not as they should be

Foreign errors (safetensors, gguf, tokenizers, pip) are mapped to these once, where the library is called.
"""


class TamisError(Exception):
    """Base of every error tamis raises on purpose."""


class ConfigError(TamisError, ValueError):
    """A model or engine configuration that cannot be run."""


class UnsupportedArchitectureError(ConfigError):
    """The configuration names an architecture that tamis does not implement."""


class UnsupportedRopeError(ConfigError):
    """The configuration asks for a RoPE scaling that tamis does not implement."""


class PageSizeError(ConfigError):
    """The page size does not divide the sparse block size."""


class ModelNotFoundError(TamisError, FileNotFoundError):
    """No such model directory, file or name."""


class DownloadError(TamisError, RuntimeError):
    """A model could not be fetched, or its bytes are not the expected ones."""


class WeightError(TamisError, ValueError):
    """A weight file is not what the configuration calls for."""


class MissingTensorError(WeightError):
    """A tensor that the model needs is in no weight file."""


class UnexpectedTensorError(WeightError):
    """A weight file holds a tensor that the model has no place for."""


class TensorShapeError(WeightError):
    """A tensor's shape differs from what the configuration calls for."""


class BaseMismatchError(WeightError):
    """An index branch was made for other weights than those beside it."""


class TensorDtypeError(WeightError):
    """A tensor is stored in a type that cannot be read as weights."""


class CorruptFileError(WeightError):
    """A weight file is truncated, or its counts, offsets or sizes lie."""


class TokenizerError(TamisError, ValueError):
    """The tokenizer or chat template is missing, unknown, or fails."""


class RequestError(TamisError, ValueError):
    """A request that cannot be run; refused before any work is done."""


class SamplingError(RequestError):
    """A sampling parameter is out of its range."""


class GrammarError(RequestError):
    """A schema or grammar for structured output cannot be compiled, or became too complex to follow."""


class EmptyPromptError(RequestError):
    """The prompt has no tokens."""


class TokenRangeError(RequestError):
    """A token id lies outside the vocabulary."""


class PromptTooLongError(RequestError):
    """The prompt alone fills the model's context or exceeds it; output is cut down to the room there is."""


class NeverFitsError(RequestError):
    """The request needs more pages than the whole pool has."""


class SessionError(RequestError):
    """A named session that cannot be: there are no KV tiers, its name is none, or its prompt fills no page."""


class SessionNotFoundError(SessionError):
    """There is no session of this name, or no request of this id that it could be made of."""


class LogitsError(TamisError, RuntimeError):
    """The model gave logits that nothing can be sampled from: NaN, +inf, or all -inf."""


class LayerError(TamisError, ValueError):
    """A layer id that the pool or layout cannot serve."""


class NotALayerIdError(LayerError, TypeError):
    """The layer id is not an int."""


class LayerNotLocalError(LayerError):
    """The layer belongs to another pipeline stage, or to no stage at all."""


class NotSparseLayerError(LayerError):
    """The layer is dense: it has no index plane."""


class NotKeyOnlyLayerError(LayerError):
    """The layer is not in the K-only sparse group."""


class NoIndexValueError(LayerError):
    """The layer has no index value plane."""


class SlotError(TamisError, ValueError):
    """Slot ids (`loc`) that are out of range or of the wrong shape or dtype."""


class PlaneError(TamisError, ValueError):
    """A tensor to be written has the wrong shape, dtype or device."""


class PageError(TamisError, ValueError):
    """A page id that cannot be used."""


class DoubleFreeError(PageError):
    """A page was freed that nobody holds."""


class ForeignPageError(PageError):
    """A page id that this pool never hands out."""


class OutOfPagesError(TamisError, RuntimeError):
    """Fewer pages are free than were asked for."""


class BlobMismatchError(TamisError, ValueError):
    """Exported pages belong to another layout than the pool they are imported into."""


class TransferError(TamisError, RuntimeError):
    """A layer load failed, was abandoned, or did not arrive by its deadline."""


class TierError(TamisError, RuntimeError):
    """A KV tier cannot do now what it was asked for; what it holds counts as missing."""


class TierReadError(TierError):
    """A page is not in the tier, or is not what was written under its key."""

    def __init__(self, key: bytes, why: str, *, corrupt: bool = False) -> None:
        super().__init__(f"page {key.hex()} cannot be read: {why}")
        self.key = key
        self.why = why
        self.corrupt = corrupt
        """Something lies under the key, and it is of no use to anybody."""


class KernelInputError(TamisError, ValueError):
    """The operands of a kernel do not fit together."""


class KernelFailedError(TamisError, RuntimeError):
    """A compiled kernel raised: memory ran out inside it, or it has a fault."""


class EngineClosedError(TamisError, RuntimeError):
    """The engine was used after close()."""


class QueueFullError(TamisError, RuntimeError):
    """As many requests wait as may."""


class EngineDeadError(TamisError, RuntimeError):
    """The engine's thread ended on an error that it could not go on after."""


class RemoteError(TamisError, RuntimeError):
    """A server that was asked does not answer, or not as OpenAI's API says."""


class CatalogError(TamisError, ValueError):
    """A file of error records, or a data set of them, is not as it should be."""
