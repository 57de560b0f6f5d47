"""A plain NumPy model of a KV pool, to test pools and models built on them against.

The model keeps what the pool promises to keep, in global coordinates and one id at a time: no shards, no JAX indexing
and no arithmetic shared with the library. It mutates in place; a pool does not.

    model = MHAModel(size=8, page_size=4, dtype=jnp.bfloat16, head_num=2, head_dim=4, layer_num=2, dcp_size=4)
    pool, _ = pool.set_kv_buffer(0, loc, k, v), model.set_kv_buffer(0, loc, k, v)
    assert_pool_equals(pool, model)
"""

from jkv.testing.asserts import assert_invariants as assert_invariants
from jkv.testing.asserts import assert_pool_equals as assert_pool_equals
from jkv.testing.codecs import DSACodec as DSACodec
from jkv.testing.codecs import FP4Codec as FP4Codec
from jkv.testing.codecs import PlainCodec as PlainCodec
from jkv.testing.models import MHAModel as MHAModel
from jkv.testing.models import MLAModel as MLAModel
from jkv.testing.models import PoolModel as PoolModel
from jkv.testing.models import deal as deal
from jkv.testing.models import model_like as model_like
