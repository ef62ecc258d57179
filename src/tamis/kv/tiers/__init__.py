"""Places outside the pool that keep pages: host memory, disk, Redis or Valkey, any fsspec store, and stacks of them."""

from tamis.kv.tiers.base import Key, ReadPart, Tier, TierEntry, TierStat
from tamis.kv.tiers.format import encode_page, encode_pages
from tamis.kv.tiers.keys import next_keys, page_keys, root_key
from tamis.kv.tiers.spec import open_tiers, parse_tier
from tamis.kv.tiers.stack import TierStack

__all__ = [
    "Key",
    "ReadPart",
    "Tier",
    "TierEntry",
    "TierStack",
    "TierStat",
    "encode_page",
    "encode_pages",
    "next_keys",
    "open_tiers",
    "page_keys",
    "parse_tier",
    "root_key",
]
