"""KV-cache pools for JAX serving: one slot space, every write and read under decode context parallelism."""

from jkv import quant as quant
from jkv.admission import Admission as Admission
from jkv.allocator import PagedTokenToKVPoolAllocator as PagedTokenToKVPoolAllocator
from jkv.allocator import TokenToKVPoolAllocator as TokenToKVPoolAllocator
from jkv.capacity import Capacity as Capacity
from jkv.capacity import PoolSpec as PoolSpec
from jkv.capacity import bytes_per_token as bytes_per_token
from jkv.capacity import max_tokens as max_tokens
from jkv.checked import checked_jit as checked_jit
from jkv.checked import wait_for_checks as wait_for_checks
from jkv.checks import KVIndexError as KVIndexError
from jkv.checks import enable_checks as enable_checks
from jkv.checks import maybe_detect_nan as maybe_detect_nan
from jkv.checks import maybe_detect_oob as maybe_detect_oob
from jkv.checks import maybe_detect_page_aligned as maybe_detect_page_aligned
from jkv.dcp import attend_rows as attend_rows
from jkv.dcp import local_page_table as local_page_table
from jkv.dcp import local_rows as local_rows
from jkv.dcp import merge_states as merge_states
from jkv.host_copy import HostCopy as HostCopy
from jkv.page_plan import decode_slots as decode_slots
from jkv.page_plan import extend_slots as extend_slots
from jkv.pools.base import PoolOptions as PoolOptions
from jkv.pools.base import export_disabled_checks as export_disabled_checks
from jkv.pools.dsa import DSATokenToKVPool as DSATokenToKVPool
from jkv.pools.mha import MHATokenToKVPool as MHATokenToKVPool
from jkv.pools.mha_fp4 import MHATokenToKVPoolFP4 as MHATokenToKVPoolFP4
from jkv.pools.mla import MLATokenToKVPool as MLATokenToKVPool
from jkv.pools.mla_fp4 import MLATokenToKVPoolFP4 as MLATokenToKVPoolFP4
from jkv.radix_cache import Match as Match
from jkv.radix_cache import RadixCache as RadixCache
from jkv.radix_events import PagesRemoved as PagesRemoved
from jkv.radix_events import PagesStored as PagesStored
from jkv.request import ReqToTokenPool as ReqToTokenPool
from jkv.slots import SlotSpace as SlotSpace
from jkv.slots import pad_slots as pad_slots
from pallas_kernels.scatter_rows import scatter_rows as scatter_rows

__version__ = "0.1.0"

__all__ = [
    "Admission",
    "Capacity",
    "DSATokenToKVPool",
    "HostCopy",
    "KVIndexError",
    "MHATokenToKVPool",
    "MHATokenToKVPoolFP4",
    "MLATokenToKVPool",
    "MLATokenToKVPoolFP4",
    "Match",
    "PagedTokenToKVPoolAllocator",
    "PagesRemoved",
    "PagesStored",
    "PoolOptions",
    "PoolSpec",
    "RadixCache",
    "ReqToTokenPool",
    "SlotSpace",
    "TokenToKVPoolAllocator",
    "attend_rows",
    "bytes_per_token",
    "checked_jit",
    "decode_slots",
    "enable_checks",
    "export_disabled_checks",
    "extend_slots",
    "local_page_table",
    "local_rows",
    "max_tokens",
    "maybe_detect_nan",
    "maybe_detect_oob",
    "maybe_detect_page_aligned",
    "merge_states",
    "pad_slots",
    "quant",
    "scatter_rows",
    "wait_for_checks",
]
