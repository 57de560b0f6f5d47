"""What the ops' triton kernels share.

JAX deprecates this backend. To drop it, delete this folder, the ops' `triton.py`, and the name in `dispatch`.
"""

from pallas_kernels.triton.rows import Columns as Columns
from pallas_kernels.triton.rows import move as move
from pallas_kernels.triton.rows import refusal as refusal
from pallas_kernels.triton.rows import whole_rows as whole_rows
