"""Row scatter and gather of paged KV caches: raw arrays in, raw arrays out."""

from pallas_kernels.gather_dsa import gather_dsa as gather_dsa
from pallas_kernels.gather_fp4 import gather_fp4 as gather_fp4
from pallas_kernels.gather_rows import gather_rows as gather_rows
from pallas_kernels.move_rows import move_rows as move_rows
from pallas_kernels.scatter_dsa import scatter_dsa as scatter_dsa
from pallas_kernels.scatter_kv import scatter_kv as scatter_kv
from pallas_kernels.scatter_kv_fp4 import scatter_kv_fp4 as scatter_kv_fp4
from pallas_kernels.scatter_mla import scatter_mla as scatter_mla
from pallas_kernels.scatter_mla_fp4 import scatter_mla_fp4 as scatter_mla_fp4
from pallas_kernels.scatter_rows import scatter_rows as scatter_rows
