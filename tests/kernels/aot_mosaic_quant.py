"""`aot_mosaic` for the ops that quantise and those that read back.

python tests/kernels/aot_mosaic_quant.py CHIP < calls.json > facts.json
"""

import sys

import aot
import aot_mosaic
import aot_quant

if __name__ == "__main__":
    aot.Program = aot_quant.Program  # type: ignore[misc]
    aot_mosaic.main(sys.argv[1])
