"""What the mosaic kernels share: rows between dense arrays and the buffers of a pool, a batch of rows a block.

A batch takes one of three ways. *Straight*: 16-byte loads into registers, 16-byte stores to the rows; the shortest way
for few rows, and as good for many where a row fills the block's 128 threads. *Tile*: the batch's dense rows are loaded
as one tile, packed in shared memory, and sent to their slots, one bulk copy a row. *Bulk*: rows come into shared memory
by bulk copies too, one each; for batches of which only some rows are this rank's, since a row that is not costs neither
traffic nor registers. Either way all loads of a batch are in flight before its first store.
"""

from pallas_kernels.mosaic import quant as quant
from pallas_kernels.mosaic.gather import gather as gather
from pallas_kernels.mosaic.plan import Columns as Columns
from pallas_kernels.mosaic.plan import Source as Source
from pallas_kernels.mosaic.plan import refusal as refusal
from pallas_kernels.mosaic.plan import refusal_of_words as refusal_of_words
from pallas_kernels.mosaic.plan import to_words as to_words
from pallas_kernels.mosaic.scatter import scatter as scatter
