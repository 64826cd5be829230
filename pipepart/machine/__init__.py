"""Machine: the cores and the instructions that this process can use, and the cache folder.

The package knows processors and environment variables. It must not know models. Only the probe program, which runs in a
process of its own, imports torch.
"""

from pipepart.machine.host import cache_folder, peak_memory, shared_cores, usable_cores
from pipepart.machine.limits import Products, check_products, limit_instructions, products, usable

__all__ = [
    "Products",
    "cache_folder",
    "check_products",
    "limit_instructions",
    "peak_memory",
    "products",
    "shared_cores",
    "usable",
    "usable_cores",
]
