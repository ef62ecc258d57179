"""The sparse KV pool and what addresses it: layouts, pages, page tables, layer transfers. Loads no engine, no Numba."""

from tamis.config import LayerKind
from tamis.kv.allocator import PageAllocator
from tamis.kv.blob import PageBlob
from tamis.kv.layout import KVLayout, LayerScales, split_layers
from tamis.kv.manager import KVManager, KVSequence, PageUsage
from tamis.kv.page_table import PageTable
from tamis.kv.pool import SparseKVPool
from tamis.kv.prefix import PrefixNode, PrefixTree, Tokens
from tamis.kv.slots import SlotIds
from tamis.kv.transfer import INDEX, MAIN, LayerPart, LayerTransferCounter, TransferTicket

__all__ = [
    "INDEX",
    "MAIN",
    "KVLayout",
    "KVManager",
    "KVSequence",
    "LayerKind",
    "LayerPart",
    "LayerScales",
    "LayerTransferCounter",
    "PageAllocator",
    "PageBlob",
    "PageTable",
    "PageUsage",
    "PrefixNode",
    "PrefixTree",
    "SlotIds",
    "SparseKVPool",
    "Tokens",
    "TransferTicket",
    "split_layers",
]
